"""What `jaxpost best` and `jaxpost reject` take on their command lines."""

from jaxpost.commands.arguments import Parser, add_model_options, within

SOURCES = """MODEL is a Hugging Face folder or hub id, a run's folder or a checkpoint, which samples
N completions of each prompt; or a file of completions from any tool: rows of prompt and completions
(a list of texts or messages), of the prompts in DATA. DATA is a file, folder or glob of prompts as
for training; what --reward needs is in its columns.

--reward and --scorer are functions, module:name or file.py:name, or folders of reward models,
process reward models or generative verifiers. key=value pairs set keys as in a configuration: of
`data`, `reward`, `scorer`, `rollout` and `seed`; scorer.steps=product for instance, or
scorer.function and scorer.model for a sum of both. Of a run they start from its own.

Completion s of row p of DATA depends on the seed, p and s alone. With --samples FILE completions,
rewards and scores are kept as they come, and the same command goes on where it was stopped; FILE
can also take MODEL's place, to choose anew."""

BEST = f"""How well completions are chosen: for n = 1, 2, 4, … N of each prompt

  pass@n     whether any of n is right: what the best choice would reach
  best       whether the one of n with the highest score is right (best-of-n)
  majority   whether the answer that most of n give is right (self-consistency)
  weighted   the same, each vote weighing what the scorer gives it
  reward     the mean reward of the one with the highest score
  score      with --scorer, the mean score of it

Right is a reward of at least --correct. Without --scorer the reward itself chooses, which shows
what a perfect scorer would reach. Every number is the mean over all subsets of n of the N
completions, so all of them are used and it is unbiased; weighted is over --subsets random ones
where there are more. Equal scores, and answers with equally many votes, count by their mean, as if
the first to be sampled were taken. Completions without a reward or a score are left out and
counted; those without an answer do not vote.

Answers are found as the verifiers of jaxpost do, and in mathematics compared by algebra; for other
rewards --answer names a function of yours, (completion) -> text or None.

{SOURCES}"""

REJECT = f"""Rejection sampling: keeps the completions of a model that pass, to fine-tune on.

OUT is a .jsonl file of rows that the recipe sft reads: prompt, completion (text or messages, as
DATA has them), reward, score where there is a scorer, and copies, how often it was sampled. With
--least a completion passes if its reward is at least this (rejection-sampling fine-tuning); with
--keep K only the K best of each prompt are kept, by the scorer, else by the reward (best-of-n
distillation; SWE-Gym caps at 2); equals in the order in which they were sampled. Each text is kept
once a prompt. What is left out is counted by its reason:

  no_reward   what could not be judged, or has no score
  cut_off     it ended because it was long, so it has no end to learn
  empty       no words
  below       its reward is under --least
  duplicate   the same text as another of its prompt
  over_cap    --keep better ones of its prompt are kept

--pairs FILE also writes preference pairs that dpo reads, one a prompt: the best completion that
passes against the worst that does not (without --least against the worst), with their scores
(score_chosen, score_rejected), if these are apart by more than --margin.

{SOURCES} Without --samples it is OUT's name with
.samples.jsonl at its end."""


def best() -> Parser:
    """Of `jaxpost best`."""
    parser = Parser("best", BEST)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("data", metavar="DATA")
    add("overrides", metavar="key=value", nargs="*")
    add_judges(parser)
    add(
        "--correct",
        type=within(float),
        help="least reward that is right (default: 1, or the run's)",
    )
    add("--answer", metavar="FUNCTION", help="the final answer: module:name or file.py:name")
    add(
        "--vote",
        choices=("score", "sigmoid"),
        help="weight of a vote: the score, or σ(score) where scores may be negative (default: "
        "sigmoid where a reward model alone scores, else score)",
    )
    subsets = within(int, least=1, most=100_000)
    add("--subsets", type=subsets, help="most subsets for a weighted vote (default: 1000)")
    add_drawing(parser)
    add("--samples", metavar="FILE", help="keep completions, rewards and scores as JSONL; go on")
    add("--json", action="store_true", help="one line of JSON instead of a table")
    return parser


def reject() -> Parser:
    """Of `jaxpost reject`."""
    parser = Parser("reject", REJECT)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("data", metavar="DATA")
    add("out", metavar="OUT")
    add("overrides", metavar="key=value", nargs="*")
    add_judges(parser)
    add("--least", type=within(float), help="reward that a completion must have")
    add("--keep", type=within(int, least=1), metavar="K", help="at most K of each prompt, the best")
    add("--pairs", metavar="FILE", help="also write pairs of the best and the worst")
    gap = within(float, least=0)
    add(
        "--margin", type=gap, help="of pairs: their scores are apart by more than this (default: 0)"
    )
    add("--overwrite", action="store_true", help="replace OUT, and the file of --pairs")
    add_drawing(parser)
    add("--samples", metavar="FILE", help="completions, rewards and scores as JSONL; go on from it")
    return parser


def add_judges(parser: Parser) -> None:
    """What a completion is worth, and what chooses."""
    add = parser.add_argument
    add("--reward", metavar="WHAT", help="what a completion is worth (default: the run's reward)")
    add("--scorer", metavar="WHAT", help="what chooses (default: the reward)")


def add_drawing(parser: Parser) -> None:
    """How completions are drawn."""
    add = parser.add_argument
    add_model_options(parser)
    number = within(int, least=1, most=1024)
    add("--completions", type=number, metavar="N", help="of each prompt (default: 8, or the run's)")
    above = within(float, above=0)
    add("--temperature", type=above, help="of these (default: 1, or the run's)")
    whole = within(int, least=1)
    add("--max-tokens", type=whole, help="longest completion (default: 128, or the run's)")
    add("--batch-size", type=whole, help="completions sampled at once (default: 64)")
    add("--rows", type=whole, help="only the first so many prompts")
