"""The whole way in minutes on two CPU cores: pretrain a small model, then teach it to answer.

The text to pretrain on states sums ("11+7=18. What is 3+9? 12."); the questions to fine-tune on ask
for some of them, as a chat. What is measured is held out: questions about the other sums, whose
answers the model has only ever read as text. So pretraining must supply the facts and fine-tuning
the form; the table at the end shows both stages.

    jaxpost quickstart
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import console, table

from jaxpost import checkpoint, optimizers, writer
from jaxpost.data import chat, sources
from jaxpost.recipes import evaluation, pretrain, setup, sft

LARGEST = 12  # sums of two numbers below this
HELD_OUT = 60  # of the 144 sums, asked only in the evaluation
ARCHITECTURE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
}
STATEMENTS = ("{a}+{b}={c}.", "What is {a}+{b}? {c}.", "What is {a} plus {b}? {c}.")
QUESTIONS = ("What is {a}+{b}?", "What is {a} plus {b}?")


def main(arguments: Sequence[str] = ()) -> int:
    """Runs both stages in a folder (again: resumes them) and prints what they reached."""
    parser = argparse.ArgumentParser(prog="jaxpost quickstart", description=__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="folder (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training steps")
    options = parser.parse_args(arguments)
    folder = Path(options.run)
    write_data(folder / "data")
    stages = configs(folder, options.scale)
    for name, (recipe, config) in stages.items():
        console.Console().print(f"\n[bold]{name}[/bold]  ({config.steps} updates, {config.run})")
        code = recipe.train(config)
        if code:
            return code
    console.Console().print(results({name: Path(c.run) for name, (_, c) in stages.items()}))
    console.Console().print(
        f"\nThe model is in {folder}/sft/model, a Hugging Face folder. Talk to it:\n"
        f"  {sys.executable} -m jaxpost sample {folder}/sft/model "
        '--prompt "What is 11 plus 7?" --temperature 0',
        highlight=False,
        soft_wrap=True,
    )
    return 0


def write_data(folder: Path) -> None:
    """`text.jsonl` states every sum; `chat.jsonl` asks for some, `held_out.jsonl` for others."""
    folder.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(0)
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random_.shuffle(pairs)
    asked, held_out = pairs[HELD_OUT:], pairs[:HELD_OUT]
    statements = [filled(form, *pair) for pair in pairs for form in STATEMENTS]
    texts = []
    for _ in range(100):
        random_.shuffle(statements)
        texts += [" ".join(statements[i : i + 12]) for i in range(0, len(statements), 12)]
    write_rows(folder / "text.jsonl", ({"text": text} for text in texts[40:]))
    write_rows(folder / "text_held_out.jsonl", ({"text": text} for text in texts[:40]))
    write_rows(folder / "chat.jsonl", (question(f, *p) for p in asked for f in QUESTIONS))
    write_rows(folder / "held_out.jsonl", (question(QUESTIONS[1], *pair) for pair in held_out))


def filled(form: str, a: int, b: int) -> str:
    return form.format(a=a, b=b, c=a + b)


def question(form: str, a: int, b: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": filled(form, a, b)}],
        "completion": [{"role": "assistant", "content": str(a + b)}],
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Left alone if it is there with this content, so that a run can be resumed."""
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


def configs(folder: Path, scale: float) -> dict[str, tuple[Any, sft.Config]]:
    """Both stages; the second starts from the model that the first one wrote."""
    data = folder / "data"
    quiet = writer.WriterConfig(every=10)
    steps = [max(2, round(count * scale)) for count in (350, 80)]
    first = pretrain.Config(
        run=str(folder / "pretrain"),
        model=setup.ModelConfig(fresh=ARCHITECTURE, tokenizer="bytes"),
        data=sources.DataConfig(
            train=str(data / "text.jsonl"),
            eval=str(data / "text_held_out.jsonl"),
            max_length=256,
            packing=True,
        ),
        optimizer=optimizers.OptimizerConfig(
            learning_rate=3e-3, schedule="cosine", warmup=steps[0] // 20
        ),
        batch_size=16,
        steps=steps[0],
        log=quiet,
        checkpoint=checkpoint.CheckpointConfig(every=100, keep_last=1),
    )
    second = sft.Config(
        run=str(folder / "sft"),
        model=setup.ModelConfig(path=str(folder / "pretrain" / "model")),
        data=sources.DataConfig(
            train=str(data / "chat.jsonl"),
            eval=str(data / "held_out.jsonl"),
            max_length=256,
            packing=True,
        ),
        chat=chat.ChatOptions(),
        optimizer=optimizers.OptimizerConfig(
            learning_rate=5e-4, schedule="cosine", warmup=steps[1] // 10
        ),
        batch_size=8,
        steps=steps[1],
        eval=evaluation.EvalConfig(generate=HELD_OUT, max_new_tokens=8),
        log=quiet,
        checkpoint=checkpoint.CheckpointConfig(every=50, keep_last=1),
    )
    return {"1. pretraining on text": (pretrain, first), "2. fine-tuning on chats": (sft, second)}


def results(runs: Mapping[str, Path]) -> table.Table:
    """Held-out measures of each stage at its start and its end, from the runs' metrics."""
    shown = table.Table(title="held-out data", title_justify="left")
    for heading in ("stage", "measure", "before", "after"):
        shown.add_column(heading, justify="left" if heading in ("stage", "measure") else "right")
    for name, folder in runs.items():
        first, last = evaluations(folder)
        for number, measure in enumerate(sorted(last)):
            form = "{:.1%}" if measure.endswith(("accuracy", "match")) else "{:.3f}"
            cells = (form.format(values[measure]) for values in (first, last))
            shown.add_row("" if number else name, measure.removeprefix("eval/"), *cells)
    return shown


def evaluations(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The first and last evaluation recorded in a run's folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in records]
    found = [record for record in found if record]
    return found[0], found[-1]
