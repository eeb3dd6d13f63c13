"""What `jaxpost pairs` takes on its command line."""

import argparse

from jaxpost.commands.arguments import Parser, within

PAIRS = r"""Builds preference pairs, or labels of steps, from what an agent or a model did.

SESSIONS is a file of rows (JSON lines, Parquet, …), OUT a .jsonl file that a preference recipe
reads. Every row that is left out is counted by its reason. A turn is one assistant's message,
counted from 0; turns of others are read and not trained.

kinds, of sessions:
  trajectory  the best session of a task against each worse one (ETO)
  suffix      the expert's session from a turn on against each one begun there (IPR; HPL's steps)
  group       groups of the expert's turns against others begun there, with bucket and phase of
              the curriculum by length and difficulty (HPL)
  segment     from the error turn on, against the best session begun before it, as many turns of
              each (SDPO)
of answers in steps:
  step        the first wrong step against a right answer's step in its place (Step-DPO)
  labels      how right each step is, from completions begun after it (Math-Shepherd)

columns of sessions (others are not carried on):
  messages    the whole session, what was before a branch included
  reward      a number, or a list whose later numbers break ties; not needed of parts of sessions
  task        a name or number (default: the messages before turn 0)
  branch      the first turn of its own, of a session begun in the middle of the expert's (the best
              session of the task without this column); 0 for one begun at its beginning
  returns     group: a list a turn of rewards of rollouts from the state after it, or null; a group
              that ends with its session has the session's reward
  entropies   group --cut entropy: a number a turn
  groups      group --cut column: first turns of groups, as [0, 3, 5]
  error_turn  segment: where the session goes wrong
  end_turn    segment: the last turn of the segment (default: the session's)
  tools, chat_template_kwargs: as in other data; carried on

columns of answers:
  prompt      text or messages
  steps       a list of texts; or completion, text that is split at --separator
  correct     whether the final answer is right; labels: the label of the last step
  error_step  step: the first wrong step, from 0 (of a list, the earliest counts)
  rollouts    labels: a list a step: whether each completion begun after it is right, or null
  unfinished  true: the answer was cut off within its last step, which is left out
  task, tools, chat_template_kwargs: as above

A right answer that was sampled from the steps before an error is a row of its own, these steps
included. Pairs of turns carry first_turn (the number of the first that is compared) and
chosen_turns, rejected_turns (how many each session has up to its end)."""

KINDS = ("trajectory", "suffix", "group", "segment", "step", "labels")
ONLY = {
    "least": ("trajectory", "suffix", "group"),
    "worst": ("trajectory",),
    "whole": ("trajectory",),
    "cut": ("group",),
    "size": ("group",),
    "percentile": ("group",),
    "lengths": ("group",),
    "difficulties": ("group",),
    "phase": ("group",),
    "separator": ("step", "labels"),
    "soft": ("labels",),
    "escape": ("labels",),
}  # the kinds that an option is for


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return tuple(float(part) for part in text.split(","))


def parser() -> Parser:
    """Of `jaxpost pairs`."""
    parser = Parser("pairs", PAIRS)
    add = parser.add_argument
    add("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    add("sessions", metavar="SESSIONS")
    add("out", metavar="OUT")
    add("--malformed", choices=("error", "drop"), default="error", help="rows that cannot be read")
    add("--overwrite", action="store_true", help="replace OUT")
    add("--least", type=within(float), help="reward that the winner, or expert, must have")
    add("--worst", action="store_true", help="trajectory: only against the worst")
    text = "trajectory: all turns on both sides, also those that they begin with alike"
    add("--whole", action="store_true", help=text)
    add_group_options(parser)
    add("--separator", help=r"step, labels: what is between steps (default: \n, a line break)")
    add("--soft", action="store_true", help="labels: the part that is right, not whether any is")
    add("--escape", help=r"labels: the separator inside a step becomes this (default: \n as text)")
    return parser


def add_group_options(parser: Parser) -> None:
    """Of groups and their curriculum."""
    add = parser.add_argument
    cuts = ("size", "number", "entropy", "column")
    add("--cut", choices=cuts, help="group: how the expert's turns are cut (default: size)")
    size = within(int, least=1)
    add(
        "--size", type=size, help="group: turns a group, or for number how many groups (default: 3)"
    )
    share = within(float, least=0, most=100)
    add(
        "--percentile",
        type=share,
        help="group --cut entropy: a group begins above it (default: 80)",
    )
    add("--lengths", type=numbers, help="group: edges of length (default: 0,3,6)")
    text = "group: edges of difficulty, falling from the greatest difference (default: 1,0.7,0.4)"
    add("--difficulties", type=numbers, help=text)
    add("--phase", type=within(int, least=1, most=3), help="group: only up to this phase")


def refuse_others(parser: Parser, options: argparse.Namespace) -> None:
    """Raises ConfigError for an option that the kind does not have, or that contradicts another."""
    for name, kinds in ONLY.items():
        if vars(options)[name] not in (None, False) and options.kind not in kinds:
            parser.error(f"--{name} is for {' and '.join(kinds)}, not for {options.kind}")
    cut = options.cut or "size"
    if options.size is not None and cut not in ("size", "number"):
        parser.error(f"--size is for --cut size and --cut number, not for {cut}")
    if options.percentile is not None and cut != "entropy":
        parser.error(f"--percentile is for --cut entropy, not for {cut}")
    edges = options.lengths or (0,)
    if edges[0] != 0 or list(edges) != sorted(set(edges)):
        parser.error("--lengths rise from 0, as in 0,3,6")
    edges = options.difficulties or (1,)
    if edges[-1] <= 0 or list(edges) != sorted(set(edges), reverse=True):
        parser.error("--difficulties fall and are above 0, as in 1,0.7,0.4")
