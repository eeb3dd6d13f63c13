"""What `jaxpost label` takes on its command line."""

from jaxpost.commands import choosing_usage
from jaxpost.commands.arguments import Parser, within

LABEL = r"""Labels the steps of solutions by what comes of them (Math-Shepherd): completions are
sampled from each step on, and a reward says which reach the right answer. A step is as right as any
of them (--soft: as the part of them that is); the last one is what the solution itself is worth.
What the reward cannot judge counts as neither right nor wrong, and is told of.

MODEL is a Hugging Face folder or hub id, a run's folder or a checkpoint. DATA is a file, folder or
glob of prompts as for `jaxpost eval`, with every other column for the reward, and
  steps       a list of texts; or completion, text that is split at --separator
  unfinished  true: it was cut off within its last step, which is left out

OUT is a .jsonl file that the recipe process_reward_model reads; `jaxpost pairs labels` makes labels
of the other kind of it, as the completions' outcomes are kept in it (rollouts). The same command
goes on where one was stopped; what a step draws depends on its row, its number and the seed alone.

key=value pairs set keys as in a configuration: of `data`, `reward`, `rollout` and `seed`. Of a run
they start from its own."""


def parser() -> Parser:
    """Of `jaxpost label`."""
    parser = Parser("label", LABEL)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("data", metavar="DATA")
    add("out", metavar="OUT")
    add("overrides", metavar="key=value", nargs="*")
    add("--reward", metavar="WHAT", help="says which are right (default: the run's reward)")
    number = within(float)
    add(
        "--correct",
        type=number,
        help="right is a reward of at least this (default: 1, or the run's)",
    )
    add("--separator", default="\\n", help=r"what is between steps (default: \n, a line break)")
    add("--soft", action="store_true", help="the part that is right, not whether any is")
    add("--escape", help=r"the separator inside a step becomes this (default: \n as text)")
    add("--overwrite", action="store_true", help="begin anew where OUT exists")
    choosing_usage.add_drawing(parser)
    parser.set_defaults(scorer=None)
    return parser
