"""What each verb takes on its command line; `--help` needs no more than this, and no JAX."""

from jaxpost.commands import choosing_usage, label_usage, pairs_usage
from jaxpost.commands.arguments import Parser, add_model_options, dtype_option, within

SAMPLE = """Writes a model's completion of each prompt as it comes, or talks with you.

MODEL is a Hugging Face folder or hub id, a run's folder, or a checkpoint. Prompts come from
--prompt, or else from standard input (as one prompt); at a terminal, without --prompt, a chat
begins. They go through the model's chat template, where it has one, as the user's turn.

In a chat, /reset forgets the conversation, /quit (or Ctrl-D) ends it, and Ctrl-C ends a reply."""

EVAL = """Measures a model on a data file: loss (nats a target), perplexity and token
accuracy, and with --generate the share of rows that it answers exactly as the data does.

By a reward, with --reward or of a run of grpo, ppo or pmd: the share of prompts that it completes
correctly (greedily; correct is a reward of at least eval.correct), the mean reward, how many have
none and, with --completions, pass@k. What --reward needs is in DATA's columns, as in training.

A reward model, process reward model or generative verifier is measured by the labels in DATA, as in
its own training: accuracy, calibration, and first errors of steps.

MODEL is a Hugging Face folder or hub id, or a run's folder. DATA is a file, folder or glob of any
row type that training reads. key=value pairs set keys as in a configuration: of `data` and `chat`,
data.max_length=512 for instance; by a reward of `data`, `reward`, `rollout`, `eval` and `seed`. Of
a run they start from its own."""

INSPECT = """Shows one batch of a configuration's data as the model will see it: counts, what was
dropped and why, and the first rows: every token, coloured by whether it is trained, where sequences
begin and end, weights.

Weights are shown as the data gives them; an update divides them by their sum."""

CONVERT = """Writes a Hugging Face folder, which transformers and vLLM load unchanged.

SOURCE is a Hugging Face folder or hub id, a .gguf file (or a wheel or zip that holds one), a PEFT
adapter (folded into its base model), a run's folder, or one of its checkpoints."""


QUICKSTART = """The whole way in minutes on two CPU cores: pretrains a small model on texts that
state sums, shows it a few chats, lets it answer further questions and reinforces what is right.
A table at the end shows what each stage reached on others. Run again, it resumes."""


def sample() -> Parser:
    """Of `jaxpost sample`."""
    parser = Parser("sample", SAMPLE)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--prompt", action="append", help="a prompt; may be given several times")
    add("--chat", action="store_true", help="talk at the terminal")
    add("--system", help="a system message to begin with")
    add("--raw", action="store_true", help="continue the prompt as plain text")
    add("--max-tokens", type=within(int, least=1), default=256, help="longest reply (default: 256)")
    add(
        "--temperature",
        type=within(float, least=0),
        default=0.7,
        help="0 is greedy (default: 0.7)",
    )
    add("--top-k", type=within(int, least=1), help="draw from the k most probable tokens")
    add(
        "--top-p",
        type=within(float, above=0, most=1),
        help="draw from the most probable of this mass",
    )
    add(
        "--min-p",
        type=within(float, least=0, most=1),
        help="least probability, as a share of the highest",
    )
    add("--stop", action="append", default=[], help="text that ends a reply; may be repeated")
    add("--seed", type=within(int, least=0), default=0, help="of the draws (default: 0)")
    add_model_options(parser)
    return parser


def eval() -> Parser:
    """Of `jaxpost eval`."""
    parser = Parser("eval", EVAL)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("data", metavar="DATA")
    add("overrides", metavar="key=value", nargs="*")
    add_model_options(parser)
    add(
        "--batch-size",
        type=within(int, least=1),
        help="rows at once (default: 8); by a reward completions (default: 64, or the run's)",
    )
    add("--rows", type=within(int, least=1), help="only the first so many rows")
    add("--generate", type=within(int, least=0), default=0, help="rows to answer greedily")
    add("--reward", metavar="FUNCTION", help="judge completions: module:name or file.py:name")
    add(
        "--completions",
        type=within(int, least=1),
        metavar="N",
        help="by a reward: sample N of each prompt for pass@k, k being 1, 8 and N (eval.pass_at)",
    )
    add(
        "--temperature",
        type=within(float, above=0),
        help="of these completions (default: 1, or the run's)",
    )
    add(
        "--max-tokens",
        type=within(int, least=1),
        help="longest answer (default: 128, or the run's)",
    )
    add("--samples", metavar="FILE", help="write prompts, greedy answers and verdicts as JSONL")
    add("--json", action="store_true", help="one line of JSON instead of a table")
    return parser


def inspect() -> Parser:
    """Of `jaxpost inspect`."""
    parser = Parser("inspect", INSPECT)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the configuration file")
    add("overrides", metavar="key=value", nargs="*", help="keys set over it")
    add("--batch", type=within(int, least=0), default=0, help="which batch, from 0 (default: 0)")
    add("--rows", type=within(int, least=0), default=3, help="how many rows (default: 3)")
    add("--row", type=within(int, least=0), help="only this row, and a table of all its places")
    add("--width", type=within(int, least=1), help="columns to write (default: the terminal's)")
    add("--plain", action="store_true", help="marks instead of colours")
    return parser


def convert() -> Parser:
    """Of `jaxpost convert`."""
    parser = Parser("convert", CONVERT)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what to convert")
    add("target", metavar="TARGET", help="the folder to write")
    dtype_option(parser)
    add("--adapter", help="a PEFT adapter to fold into SOURCE")
    add("--base", help="the base of SOURCE, where SOURCE is an adapter")
    add("--step", default="latest", help="of a run: latest, best or a number")
    add("--overwrite", action="store_true", help="replace the model in TARGET")
    return parser


def quickstart() -> Parser:
    """Of `jaxpost quickstart`."""
    parser = Parser("quickstart", QUICKSTART)
    add = parser.add_argument
    add("--run", default="runs/quickstart", help="folder (default: runs/quickstart)")
    scale = within(float, above=0)
    add("--scale", type=scale, default=1.0, help="share of the training steps (default: 1)")
    add(
        "--method",
        choices=("grpo", "ppo", "pmd"),
        default="grpo",
        help="of reinforcement learning (default: grpo)",
    )
    return parser


PARSERS = {
    "quickstart": quickstart,
    "sample": sample,
    "eval": eval,
    "inspect": inspect,
    "convert": convert,
    "pairs": pairs_usage.parser,
    "label": label_usage.parser,
    "best": choosing_usage.best,
    "reject": choosing_usage.reject,
}
