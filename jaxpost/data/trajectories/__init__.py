"""Pairs and labels below the whole answer, built from sessions of many turns and answers in steps.

`sessions` reads rows; `pairs` compares sessions of one task (whole, from a branch, by segments);
`groups` compares groups of actions and orders them by difficulty (HPL); `steps` compares steps
(Step-DPO) and labels them (Math-Shepherd). All are functions of rows to rows: every row left out
is a `Dropped` with one of `REASONS`. A turn is one assistant's message, counted from 0.
"""

REASONS = {
    "alone": "the only session of its task",
    "branched": "begun in the middle of another session, so no whole trajectory of its own",
    "empty_prompt": "no message before the turn that differs",
    "group_ended": "the loser has no turn in the group",
    "history_differs": "no other session has the same messages before the turn that counts",
    "identical": "the same turns on both sides, but for white space",
    "later_phase": "in a phase after --phase",
    "malformed": "a row that cannot be read (--malformed drop)",
    "no_branch": "an expert's turn or group without a session that branches off there",
    "no_correction": "no right answer goes on from the steps before the error",
    "no_error_step": "a wrong answer whose first wrong step is not told",
    "no_error_turn": "a session of a task where none has an error turn",
    "no_expert": "no whole session of the task, or none with the reward that --least asks for",
    "no_label": "no step with a label",
    "no_return": "a group with neither rewards measured after it nor the end of its session",
    "no_reward": "a part of a session, without a reward",
    "no_turns": "nothing is left after cutting both segments to the same number of turns",
    "no_verdict": "an answer of which it is not told whether it is right",
    "not_best": "not the best of the sessions begun before an error turn",
    "not_better": "the winner's group does not lead to more reward",
    "not_expert": "a whole session of the task that is not its best",
    "not_worse": "more reward than what it would be compared with",
    "not_worst": "worse than the best, and not the worst (--worst)",
    "partner_differs": "the first difference is in what the partner says, not the agent",
    "prompts_differ": "sessions of one task that begin differently, or have other tools",
    "tie": "the same reward as the winner's",
    "unfinished": "an answer that was cut off",
    "unused": "a right answer that no wrong one is compared with",
}
NOTES = {
    "cut_segment": "segments of different numbers of turns, cut to the same number",
    "escaped": "steps that hold the separator, which is escaped in them",
    "missing_steps": "labels of steps that the answer does not have",
    "unfinished_step": "the last step of an answer that was cut off, left out",
    "unlabelled": "steps from the first one without a label on, left out",
}
