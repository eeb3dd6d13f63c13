"""The whole way in minutes on two CPU cores: pretrain a small model, then teach it to answer.

The text to pretrain on states sums in many forms ("11+7=18.", "Ann: What is 3 plus 9?\nBo: 12").
The questions to fine-tune on ask for some of them, as a chat; those of the evaluation ask for sums
that no chat contains, in either order, and whose answers the model has only ever read as text. So
pretraining must supply the facts and fine-tuning the form; the table at the end shows both stages.

    jaxpost quickstart
"""

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
HELD_OUT = 32  # of the 78 pairs of such numbers; asked, in both orders, only in the evaluation
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
QUESTIONS = ("What is {a}+{b}?", "What is {a} plus {b}?")
OPENINGS = ("", "It is ", "The answer is ")
SPEAKERS = ("Ann", "Bo", "Charlie", "Teacher", "Student", "Q", "A", "you", "me")
DIALOGUES = ("{x}: {q}\n{y}: {c}\n", "<{x}>\n{q}\n<{y}>\n{c}\n", "{x}\n{q}\n{y}\n{c}\n")


def train(folder: Path, scale: float = 1.0) -> int:
    """Runs both stages in a folder (again: resumes them) and prints what they reached.

    `scale` is the share of the training steps to make.
    """
    questions = write_data(folder / "data")
    stages = configs(folder, scale, questions)
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


def write_data(folder: Path) -> int:
    """`text.jsonl` states every sum; `chat.jsonl` asks for some, `held_out.jsonl` for others.

    Returns the number of held-out questions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    pairs = [(a, b) for a in range(LARGEST) for b in range(a, LARGEST)]
    draw.shuffle(pairs)
    held_out, asked = in_both_orders(pairs[:HELD_OUT]), in_both_orders(pairs[HELD_OUT:])
    texts = []
    for _ in range(80):
        statements = [statement(a, b, draw) for a, b in held_out + asked for _ in range(4)]
        draw.shuffle(statements)
        texts += ["".join(statements[i : i + 12]) for i in range(0, len(statements), 12)]
    write_rows(folder / "text.jsonl", ({"text": text} for text in texts[40:]))
    write_rows(folder / "text_held_out.jsonl", ({"text": text} for text in texts[:40]))
    write_rows(folder / "chat.jsonl", (chat_row(form, *p) for p in asked for form in QUESTIONS))
    write_rows(folder / "held_out.jsonl", (chat_row(QUESTIONS[1], *pair) for pair in held_out))
    return len(held_out)


def in_both_orders(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]


def statement(a: int, b: int, draw: random.Random) -> str:
    """The sum as an equation, as question and answer, or (every second time) as a dialogue."""
    q, c = draw.choice(QUESTIONS).format(a=a, b=b), a + b
    x, y = draw.sample(SPEAKERS, 2)
    dialogue = draw.choice(DIALOGUES).format(x=x, y=y, q=q, c=c)
    answer = f"{q} {draw.choice(OPENINGS)}{c}. "
    return draw.choice((f"{a}+{b}={c}. ", answer, dialogue, dialogue))


def chat_row(form: str, a: int, b: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": form.format(a=a, b=b)}],
        "completion": [{"role": "assistant", "content": str(a + b)}],
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Left alone if it is there with this content, so that a run can be resumed."""
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


def configs(folder: Path, scale: float, questions: int) -> dict[str, tuple[Any, sft.Config]]:
    """Both stages; the second starts from the model that the first one wrote."""
    data = folder / "data"
    steps = [max(2, round(count * scale)) for count in (1200, 40)]
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
            learning_rate=2e-3, schedule="cosine", warmup=steps[0] // 20
        ),
        batch_size=4,
        steps=steps[0],
        log=writer.WriterConfig(every=50),
        checkpoint=checkpoint.CheckpointConfig(every=300, keep_last=1),
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
            learning_rate=3e-4, schedule="cosine", warmup=steps[1] // 10
        ),
        batch_size=8,
        steps=steps[1],
        eval=evaluation.EvalConfig(generate=questions, max_new_tokens=8),
        log=writer.WriterConfig(every=10),
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
