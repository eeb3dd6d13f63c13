"""Log-probabilities of tokens: the only place with a vocabulary axis, and the door to float32.

Tokens are scored in chunks before the vocabulary projection, forward and backward, and only where
the completion mask asks for it. So no [B, T, V] array ever exists, and prompts and padding cost no
vocabulary product.
"""

from collections.abc import Callable
from typing import Any

from jaxpost.logps.loss import loss_of_hidden
from jaxpost.logps.score import score_hidden
from jaxpost.logps.settings import CHUNK_TOKENS, Settings, TokenScores
from jaxpost.models.model import Model
from jaxpost.typing import Array, Float, Params, PerToken

__all__ = [
    "CHUNK_TOKENS",
    "Settings",
    "TokenScores",
    "loss_of_hidden",
    "score_hidden",
    "token_logps",
    "token_loss",
    "token_scores",
]


def token_logps(
    model: Model,
    params: Params,
    batch: Any,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    noise: Float[Array, "B T D"] | None = None,
    chunk: int = CHUNK_TOKENS,
) -> PerToken:
    """log π(target) [B, T] in nats, float32, exactly 0 outside `batch.completion_mask`.

    π is the distribution that is sampled from: pass the sampler's `temperature`, `top_k`, `top_p`
    and `min_p`. Differentiable in `params`. `noise` and `chunk`: see `token_scores`.
    """
    scores = token_scores(
        model,
        params,
        batch,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        noise=noise,
        chunk=chunk,
    )
    return scores.logps


def token_scores(
    model: Model,
    params: Params,
    batch: Any,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    entropies: bool = False,
    noise: Float[Array, "B T D"] | None = None,
    chunk: int = CHUNK_TOKENS,
) -> TokenScores:
    """Scores of the targets of `batch` (inputs, targets, completion_mask, segment_ids, positions).

    `noise` is added to the token embeddings (NEFTune). The largest array is the logits of `chunk`
    tokens, [chunk, V] float32 (on a CPU [chunk, 2048], unless the distribution is truncated).
    """
    hidden = model.apply(params, batch.inputs, batch.segment_ids, batch.positions, noise)
    settings = Settings(
        temperature, top_k, top_p, min_p, model.config.final_softcap, chunk, entropies
    )
    return score_hidden(hidden, model.head(params), batch.targets, batch.completion_mask, settings)


def token_loss(
    model: Model,
    params: Params,
    batch: Any,
    per_token: Callable[..., Array],
    *data: PerToken,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    entropies: bool = False,
    noise: Float[Array, "B T D"] | None = None,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Float[Array, ""], TokenScores]:
    """(Σ over the completion mask of `per_token(scores, *data)`, the scores themselves).

    The same value and gradient as `jnp.sum(per_token(token_scores(...), *data))`, in three
    vocabulary products instead of four: the gradient is formed with the value, while a chunk's
    logits exist. `per_token` works element by element on flat chunks [N] of the targets, so all it
    needs of the batch comes through `data` ([B, T] each), where no gradient goes. The scores have
    no gradient either. The largest array is the logits of `chunk` tokens (on a CPU of at most
    max(256, D) tokens).

        loss, scores = token_loss(
            model, params, batch, lambda s, w: w * losses.nll(s.logps), batch.loss_weights
        )

    Raises:
      TypeError: `per_token` met an array of another shape, or does not return one loss a token.
      ValueError: an array of `data` is not [B, T].
    """
    hidden = model.apply(params, batch.inputs, batch.segment_ids, batch.positions, noise)
    settings = Settings(
        temperature, top_k, top_p, min_p, model.config.final_softcap, chunk, entropies
    )
    return loss_of_hidden(
        hidden,
        model.head(params),
        batch.targets,
        batch.completion_mask,
        settings,
        per_token,
        *data,
    )
