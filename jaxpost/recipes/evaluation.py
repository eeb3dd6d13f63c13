"""Held-out measures of a policy: loss, perplexity, token accuracy, and generated exact match."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import logps, rollout
from jaxpost.batch import TokenBatch
from jaxpost.data import chat, formats, tokenizers
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.typing import Params


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and how the policy is measured on held-out data."""

    every: int = option(
        0, "evaluate after this many updates; 0 evaluates at start and end", "updates", least=0
    )
    batch_size: int = option(8, "rows of a batch", "rows", least=1)
    rows: int | None = option(
        None, "use only the first so many rows; null uses all", "rows", least=1
    )
    generate: int = option(
        0, "rows to answer greedily and compare with the data; 0: none", "rows", least=0
    )
    max_new_tokens: int = option(128, "length of a generated answer at most", "tokens", least=1)

    def __post_init__(self):
        check_ranges(self, "eval.")
        if not self.generate and self.max_new_tokens != EvalConfig.max_new_tokens:
            raise ValueError("eval.max_new_tokens is for eval.generate, which is 0; leave it out")

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this step: at the start, every so often, and at the end."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


def refuse_unused(config: Any, used: Sequence[str] = ()) -> None:
    """Refuses what was set for an evaluation that has no data.

    `config` is a dataclass with a default for each key; those `used` have another use as well.

    Raises:
      ValueError: it names the first key that is not as by default.
    """
    default = dataclasses.asdict(type(config)())
    for key, value in dataclasses.asdict(config).items():
        if key not in used and value != default[key]:
            raise ValueError(
                f"eval.{key} needs data.eval, the held-out data to measure on; name some, or set "
                f"eval.{key}={'null' if default[key] is None else default[key]}"
            )


def make_measure(model: Model) -> Callable[[Params, TokenBatch], tuple[jax.Array, ...]]:
    """A jitted `(params, batch) -> (Σ nll, Σ correct, targets)`, to be added up over batches."""

    @jax.jit
    def measure(params: Params, batch: TokenBatch):
        scores = logps.token_scores(model, params, batch)
        return -jnp.sum(scores.logps), jnp.sum(scores.correct), jnp.sum(batch.completion_mask)

    return measure


def evaluate(
    measure: Callable[[Params, TokenBatch], tuple[jax.Array, ...]],
    params: Params,
    batches: Iterable[TokenBatch],
) -> dict[str, float]:
    """Loss (nats a target), perplexity and token accuracy over all targets of all batches.

    Raises:
      ValueError: the data holds no target.
    """
    totals = np.zeros(3)
    for batch in batches:
        totals += np.array([float(x) for x in measure(params, batch)])
    nll, correct, count = totals
    if count == 0:
        raise ValueError("the evaluation data holds no target: every row was dropped or masked")
    return {
        "eval/loss": nll / count,
        "eval/perplexity": math.exp(min(nll / count, 700.0)),
        "eval/mean_token_accuracy": correct / count,
    }


def exact_match(
    model: Model,
    params: Params,
    tokenizer: tokenizers.Tokenizer,
    rows: Sequence[formats.Row],
    options: chat.ChatOptions,
    *,
    max_new_tokens: int,
    batch_size: int = 32,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Share of rows whose greedy answer equals the data's, white space at the ends aside.

    Of reasoning, only what follows it is compared. Returns the metric and one record a row.

    Raises:
      ValueError: no row has a prompt and an answer to compare with.
    """
    asked = [question for row in rows if (question := chat.question(row, tokenizer, options))]
    if not asked:
        raise ValueError("exact match needs rows with a prompt and an answer; plain text has none")
    texts = rollout.generate_text(
        model,
        params,
        tokenizer,
        [question.prompt for question in asked],
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        batch_size=batch_size,
    )
    records: list[dict[str, Any]] = []
    for asked_for, text in zip(asked, texts, strict=True):
        correct = final_answer(text, options) == final_answer(asked_for.answer, options)
        prompt = tokenizer.decode(list(asked_for.prompt))
        records.append(
            {"prompt": prompt, "completion": text, "expected": asked_for.answer, "correct": correct}
        )
    rate = sum(record["correct"] for record in records) / len(records)
    return {"eval/exact_match": rate}, records


def final_answer(text: str, options: chat.ChatOptions) -> str:
    """What follows the reasoning, if there is any."""
    return text.rpartition(options.reasoning_close.strip())[2].strip()
