"""The whole way in minutes on two CPU cores: pretraining, fine-tuning, reinforcement learning.

The text to pretrain on states sums in several forms ("11+7=18.", "What is 3 plus 9? It is 12."; now
and then a dialogue). A few chats to fine-tune on show how a question is answered. Then the model
answers further questions by itself, and what is right is reinforced. The questions of the
evaluation ask for sums that were in no chat and in no rollout, in either order: the model has read
their answers as text, and must have learnt to give them. The table at the end shows the stages.

    jaxpost quickstart
"""

import dataclasses
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import console, table

from jaxpost import checkpoint, optimizers, rewards, writer
from jaxpost.data import prompts, sources
from jaxpost.recipes import (
    accuracy,
    evaluation,
    experience,
    grpo,
    pmd,
    ppo,
    pretrain,
    setup,
    sft,
)

LARGEST = 12  # sums of two numbers below this
HELD_OUT = 32  # of the 78 pairs of such numbers; asked, in both orders, only in the evaluation
SHOWN = 24  # sums of the other pairs whose answers fine-tuning shows; the rest are only asked
DIALOGUE = 0.03  # the share of statements that are a dialogue
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


def train(folder: Path, scale: float = 1.0, method: str = "grpo") -> int:
    """Runs the stages in a folder (again: resumes them) and prints what they reached.

    `scale` is the share of the training steps to make; `method` is grpo, ppo or pmd.
    """
    questions = write_data(folder / "data")
    stages = configs(folder, scale, questions, method)
    for name, (recipe, config) in stages.items():
        console.Console().print(f"\n[bold]{name}[/bold]  ({config.steps} updates, {config.run})")
        code = recipe.train(config)
        if code:
            return code
    console.Console().print(results({name: Path(c.run) for name, (_, c) in stages.items()}))
    console.Console().print(
        f"\nThe model is in {folder}/{method}/model, a Hugging Face folder. Talk to it:\n"
        f"  {sys.executable} -m jaxpost sample {folder}/{method}/model "
        '--prompt "What is 11 plus 7?" --temperature 0',
        highlight=False,
        soft_wrap=True,
    )
    return 0


def write_data(folder: Path) -> int:
    """`text.jsonl` states every sum, `chat.jsonl` answers questions for some of them.

    `questions.jsonl` asks for further ones, `held_out.jsonl` for those of the evaluation, whose
    number is returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    pairs = [(a, b) for a in range(LARGEST) for b in range(a, LARGEST)]
    draw.shuffle(pairs)
    held_out, asked = in_both_orders(pairs[:HELD_OUT]), in_both_orders(pairs[HELD_OUT:])
    texts = []
    for _ in range(80):
        statements = [statement(a, b, draw) for a, b in held_out + asked for _ in range(2)]
        draw.shuffle(statements)
        texts += ["".join(statements[i : i + 12]) for i in range(0, len(statements), 12)]
    write_rows(folder / "text.jsonl", ({"text": text} for text in texts[40:]))
    write_rows(folder / "text_held_out.jsonl", ({"text": text} for text in texts[:40]))
    for name, pairs in {"chat": asked[:SHOWN], "questions": asked[SHOWN:]}.items():
        rows = (chat_row(form, *pair) for pair in pairs for form in QUESTIONS)
        write_rows(folder / f"{name}.jsonl", rows)
    write_rows(folder / "held_out.jsonl", (chat_row(QUESTIONS[1], *pair) for pair in held_out))
    return len(held_out)


def in_both_orders(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]


def statement(a: int, b: int, draw: random.Random) -> str:
    """The sum as an equation, as question and answer, or now and then as a dialogue."""
    q, c = draw.choice(QUESTIONS).format(a=a, b=b), a + b
    if draw.random() < DIALOGUE:
        x, y = draw.sample(SPEAKERS, 2)
        return draw.choice(DIALOGUES).format(x=x, y=y, q=q, c=c)
    return draw.choice((f"{a}+{b}={c}. ", f"{q} {draw.choice(OPENINGS)}{c}. "))


def chat_row(form: str, a: int, b: int) -> dict[str, Any]:
    """A question with its answer, as a chat to learn from and as text to be compared with."""
    return {
        "prompt": [{"role": "user", "content": form.format(a=a, b=b)}],
        "completion": [{"role": "assistant", "content": str(a + b)}],
        "answer": str(a + b),
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Left alone if it is there with this content, so that a run can be resumed."""
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


def configs(folder: Path, scale: float, questions: int, method: str) -> dict[str, tuple[Any, Any]]:
    """The stages, each a recipe and its configuration; each starts from the model before it."""
    steps = [max(2, round(count * scale)) for count in (1200, 13, 60)]
    reinforce = {"grpo": (grpo, with_grpo), "ppo": (ppo, with_ppo), "pmd": (pmd, with_pmd)}
    recipe, configure = reinforce[method]
    return {
        "1. pretraining on text": (pretrain, on_text(folder, steps[0])),
        "2. fine-tuning on a few chats": (sft, on_chats(folder, steps[1], questions)),
        f"3. {method}: questions and a reward": (recipe, configure(folder, steps[2])),
    }


def on_text(folder: Path, steps: int) -> pretrain.Config:
    data = folder / "data"
    return pretrain.Config(
        run=str(folder / "pretrain"),
        model=setup.ModelConfig(fresh=ARCHITECTURE, tokenizer="bytes"),
        data=sources.DataConfig(
            train=str(data / "text.jsonl"),
            eval=str(data / "text_held_out.jsonl"),
            max_length=256,
            packing=True,
        ),
        optimizer=optimizers.OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup=steps // 20
        ),
        batch_size=4,
        steps=steps,
        log=writer.WriterConfig(every=50),
        checkpoint=checkpoint.CheckpointConfig(every=300, keep_last=1),
    )


def on_chats(folder: Path, steps: int, questions: int) -> sft.Config:
    data = folder / "data"
    return sft.Config(
        run=str(folder / "sft"),
        model=setup.ModelConfig(path=str(folder / "pretrain" / "model")),
        data=sources.DataConfig(
            train=str(data / "chat.jsonl"),
            eval=str(data / "held_out.jsonl"),
            max_length=256,
            packing=True,
        ),
        optimizer=optimizers.OptimizerConfig(
            learning_rate=3e-4, schedule="cosine", warmup=steps // 20
        ),
        batch_size=8,
        steps=steps,
        eval=evaluation.EvalConfig(generate=questions, max_new_tokens=8),
        log=writer.WriterConfig(every=10),
        checkpoint=checkpoint.CheckpointConfig(every=50, keep_last=1),
    )


def on_questions(folder: Path, method: str) -> dict[str, Any]:
    """What the three methods share: the policy, the questions and the reward."""
    data = folder / "data"
    return {
        "run": str(folder / method),
        "model": setup.ModelConfig(path=str(folder / "sft" / "model")),
        "data": prompts.PromptConfig(
            train=str(data / "questions.jsonl"), eval=str(data / "held_out.jsonl")
        ),
        # Comparing two short texts needs no sandbox.
        "reward": rewards.RewardConfig("jaxpost.rewards.exact:verify", isolation="process"),
        "log": writer.WriterConfig(every=5),
        "checkpoint": dataclasses.replace(accuracy.BEST, every=50, keep_last=1),
        "eval": accuracy.EvalConfig(every=20),
    }


def constant(learning_rate: float) -> optimizers.OptimizerConfig:
    return optimizers.OptimizerConfig(learning_rate=learning_rate, schedule="constant")


def with_grpo(folder: Path, steps: int) -> grpo.Config:
    return grpo.Config(
        **on_questions(folder, "grpo"),
        rollout=experience.RolloutConfig(prompts=32, completions=8, max_new_tokens=8),
        optimizer=constant(1e-4),
        steps=steps,
    )


def with_pmd(folder: Path, steps: int) -> pmd.Config:
    return pmd.Config(
        **on_questions(folder, "pmd"),
        rollout=experience.RolloutConfig(prompts=32, completions=8, max_new_tokens=8),
        optimizer=constant(1e-4),
        minibatches=2,
        tau=0.5,
        steps=steps,
    )


def with_ppo(folder: Path, steps: int) -> ppo.Config:
    return ppo.Config(
        **on_questions(folder, "ppo"),
        rollout=experience.RolloutConfig(prompts=32, completions=8, max_new_tokens=8),
        optimizer=constant(1e-4),
        critic_optimizer=constant(3e-4),
        critic_warmup=min(3, steps - 1),
        epochs=2,
        lam=1.0,
        steps=steps,
    )


MEASURES = {
    "eval/mean_token_accuracy": "next byte of new text right",
    "eval/exact_match": "held-out questions right",
    "eval/accuracy": "held-out questions right",
}


def results(runs: Mapping[str, Path]) -> table.Table:
    """The first and last held-out measure of each stage, from the runs' metrics."""
    shown = table.Table(title="on held-out data", title_justify="left")
    for heading in ("stage", "measure", "before", "after"):
        shown.add_column(heading, justify="left" if heading in ("stage", "measure") else "right")
    for name, folder in runs.items():
        first, last = evaluations(folder)
        measure = next(m for m in reversed(MEASURES) if m in last)
        shown.add_row(name, MEASURES[measure], f"{first[measure]:.1%}", f"{last[measure]:.1%}")
    return shown


def evaluations(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The first and last evaluation recorded in a run's folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in records]
    found = [record for record in found if record]
    return found[0], found[-1]
