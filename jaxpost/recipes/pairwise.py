"""What the recipes on pairs share: their rows, summed log-probabilities, held-out measures."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import compact, logps
from jaxpost.batch import PreferenceBatch, TokenBatch
from jaxpost.data import preferences
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.losses import implicit_rewards
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and how much of `data.eval` is measured."""

    every: int = option(
        0, "evaluate after this many updates; 0 evaluates at start and end", "updates", least=0
    )
    rows: int | None = option(
        None, "use only the first so many rows; null uses all", "rows", least=1
    )

    def __post_init__(self):
        check_ranges(self, "eval.")

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this update: at the start, every so often, at the end."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


def two(values: Array) -> tuple[Array, Array]:
    """[2B], of the rows → [B] of the chosen, [B] of the rejected."""
    pairs = values.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def score_settings(model: Model) -> logps.Settings:
    """Of the distribution as the model gives it."""
    return logps.Settings(1.0, None, None, None, model.config.final_softcap, logps.CHUNK_TOKENS)


def weights_of(pairs: PreferenceBatch) -> np.ndarray:
    """[2B]: of a mean over the update's pairs, at both of their rows."""
    return np.repeat(pairs.weights / max(pairs.weights.sum(), 1e-20), 2).astype(np.float32)


def plain(tokens: TokenBatch) -> compact.Plain:
    """The rows to read as they are."""
    return compact.Plain(tokens.inputs, tokens.segment_ids, tokens.positions)


def data(
    config: Any, tokenizer: Tokenizer, model: Model, *, once: bool = False, end: bool = False
) -> preferences.PreferenceStream:
    """The pairs to train on, of a recipe's configuration: without end, or each once."""
    batching = preferences.Batching(
        config.batch_size,
        config.seed,
        once=once,
        read_end=end,
        vocab_size=model.config.vocab_size,
    )
    return preferences.pairs(config.data, tokenizer, batching)


def held_out(
    config: Any, tokenizer: Tokenizer, model: Model, *, end: bool = False
) -> preferences.PreferenceStream:
    """The pairs of `data.eval`, each once."""
    batching = preferences.Batching(
        config.batch_size,
        part="eval",
        limit=config.eval.rows,
        read_end=end,
        vocab_size=model.config.vocab_size,
    )
    return preferences.pairs(config.data, tokenizer, batching)


def sums(model: Model, params: Params, batch: Any) -> Array:
    """[2B]: log-probabilities of completions, summed under `batch.token_weights`."""
    settings = score_settings(model)
    hidden = compact.hidden(model, params, batch.read)
    head, mask = model.head(params), batch.completion_mask
    scores = logps.score_hidden(hidden, head, batch.targets, mask, settings)
    return jnp.sum(batch.token_weights * scores.logps, axis=1)


def token_weights(mask: np.ndarray, length_weight: float) -> np.ndarray:
    """[2B, T]: 1 on a completion, `length_weight` beyond the length of its pair's other."""
    if length_weight == 1.0:
        return mask.astype(np.float32)
    other = mask.reshape(-1, 2, mask.shape[1])[:, ::-1].reshape(mask.shape)
    both = jnp.asarray(mask), jnp.asarray(other)
    return np.asarray(implicit_rewards.desensitized_weights(*both, alpha=length_weight))


def check_names(key: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ValueError(f"{key}: {name} is not known; do you mean {near[0]}?")


def means(total: Mapping[str, Any]) -> dict[str, float]:
    """`eval/…`: sums over all pairs, divided by `pairs`.

    Raises:
      ValueError: there is none.
    """
    if not total:
        raise ValueError("data.eval holds no pair to measure on")
    found = jax.device_get(dict(total))
    count = found.pop("pairs")
    return {f"eval/{name}": float(x / count) for name, x in found.items()}
