"""A loss of token scores, with its gradient formed while the logits exist.

For a scalar Σ_t f(score_t) the gradient of each score is known as soon as the score is, so the
backward pass need not compute the logits again: three products with the vocabulary in place of
four. (Fused linear cross entropy does the same for f = nll; Liger Kernel, arXiv 2410.10989 §3.2.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.logps import layout, tiles
from jaxpost.logps.score import score_hidden
from jaxpost.logps.settings import Settings, TokenScores
from jaxpost.typing import Array, Bool, Float, Hidden, Mask, Tokens

# Tokens whose logits a CPU keeps, at least: as many as the model is wide, so that the logits take
# the room of the head's gradient. More would cost more memory, fewer pass over that more often.
CPU_CHUNK = 256

PerTokenLoss = Callable[..., Array]


def loss_of_hidden(
    hidden: Hidden,
    head: Float[Array, "V D"],
    targets: Tokens,
    mask: Mask,
    settings: Settings,
    per_token: PerTokenLoss,
    *data: Array,
) -> tuple[Float[Array, ""], TokenScores]:
    """See `token_loss`."""
    for number, x in enumerate(data):
        if x.shape[:2] != mask.shape:
            raise ValueError(
                f"token_loss: data {number} has the shape {x.shape}, but needs one entry a target: "
                f"{mask.shape}"
            )
    loss, scores = _loss(settings, per_token, hidden, head, targets, mask, data)
    return loss, jax.lax.stop_gradient(scores)


def _loss_plain(settings, per_token, hidden, head, targets, mask, data):
    scores = score_hidden(hidden, head, targets, mask, settings)
    # Flat, as the chunks of `_loss_forward` are: what works here works there.
    flat, where, given = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (scores, mask, data))
    return total(per_token, flat, where, given), scores


_loss = jax.custom_vjp(_loss_plain, nondiff_argnums=(0, 1))


def total(
    per_token: PerTokenLoss, scores: TokenScores, mask: Bool[Array, " N"], data: Sequence[Array]
) -> Float[Array, ""]:
    """Σ per_token over the mask.

    Raises:
      TypeError: the result has not the scores' shape, or arrays of another shape met in it.
    """
    try:
        losses = per_token(scores, *data)
        if jnp.shape(losses) != mask.shape:
            raise TypeError(f"per_token returned the shape {jnp.shape(losses)}")
    except (TypeError, ValueError) as error:  # what JAX raises where shapes do not go together
        error.add_note(
            f"token_loss: per_token sees flat chunks, here of the shape {mask.shape}, and returns "
            "one loss for each token of them. What it needs of the batch goes through *data: "
            "token_loss(model, params, batch, lambda s, w: w * losses.nll(s.logps), "
            "batch.loss_weights)"
        )
        raise
    return jnp.sum(jnp.where(mask, losses, 0.0))


class Pass(NamedTuple):
    """What the chunks done so far have added."""

    loss: Float[Array, ""]
    scores: TokenScores
    hidden_gradient: Float[Array, "B N D"]
    head_gradient: Float[Array, "V D"]
    kept: tuple[Array, ...]  # products with the head, of the chunk at hand


def _loss_forward(settings, per_token, hidden, head, targets, mask, data):
    def run(tile, hidden, head, targets, mask, data):
        most = max(CPU_CHUNK, head.shape[1]) if tile < head.shape[0] else settings.chunk
        laid = layout.layout_of(mask, min(settings.chunk, most))
        packed, wanted = laid.pack(hidden), laid.pack(targets)
        known = tuple(laid.pack(x) for x in data)

        def add_chunk(index, done: Pass) -> Pass:
            here, wants, used, *given = (
                layout.cut(x, index, laid.size) for x in (packed, wanted, laid.used, *known)
            )
            loss, scores, part, head_gradient, kept = chunk_pass(
                settings, tile, per_token, here, head, wants, used, given, done
            )
            return Pass(
                done.loss + loss,
                jax.tree.map(
                    lambda x, y: layout.paste(x, y, index, laid.size), done.scores, scores
                ),
                layout.paste(done.hidden_gradient, part, index, laid.size),
                head_gradient,
                kept,
            )

        zeros = jnp.zeros(wanted.shape, jnp.float32)
        start = Pass(
            jnp.zeros((), jnp.float32),
            TokenScores(zeros, zeros, zeros, zeros),
            jnp.zeros_like(packed),
            jnp.zeros(head.shape, jnp.float32),
            nothing_kept(tile, head.shape[0], mask.shape[0] * laid.size),
        )
        done = jax.lax.fori_loop(0, laid.chunks, add_chunk, start)
        scores = TokenScores(*(laid.restore(field, mask) for field in done.scores))
        return done.loss, scores, laid.restore(done.hidden_gradient, mask), done.head_gradient

    loss, scores, hidden_gradient, head_gradient = tiles.by_platform(
        run, settings, hidden, head.astype(hidden.dtype), targets, mask, data
    )
    return (loss, scores), (hidden_gradient, head_gradient.astype(head.dtype))


def chunk_pass(settings, tile, per_token, hidden, head, targets, used, data, done: Pass):
    """Loss, scores and gradients of one chunk: (loss, scores, hidden's, the head's, kept)."""

    def look(tile: tiles.Tile, carry):
        so_far, kept = carry
        raw = tiles.project(hidden, tile)
        so_far = tiles.add_logits(settings, so_far, raw, tile.start, targets)
        return so_far, keep(kept, tile, raw)

    found, kept = tiles.over_tiles(tile, head, look, (tiles.running(targets), done.kept))
    scores = tiles.scores_of(settings, found)

    def loss_of(differentiable: tiles.ScoreGradients):
        return total(per_token, scores._replace(**differentiable._asdict()), used, data)

    loss, gradients = jax.value_and_grad(loss_of)(
        tiles.ScoreGradients(scores.logps, scores.log_normalizers, scores.entropies)
    )

    def add(tile: tiles.Tile, carry):
        raw = kept[1] if tile.number is None else kept[0][tile.number]
        gradient = tiles.raw_gradient(
            settings,
            raw,
            tile.start,
            targets,
            scores,
            gradients,
        )
        return tiles.add_gradient(tile, hidden, gradient, carry)

    start = (jnp.zeros(hidden.shape, jnp.float32), done.head_gradient)
    part, head_gradient = tiles.over_tiles(tile, head, add, start)
    return loss, scores, part, head_gradient, kept


def nothing_kept(tile: int, vocabulary: int, tokens: int) -> tuple[Array, Array]:
    """Room for the whole tiles [n, N, tile] and for the rest [N, V mod tile]."""
    size = min(tile, vocabulary)
    count, rest = divmod(vocabulary, size)
    return jnp.zeros((count, tokens, size)), jnp.zeros((tokens, rest))


def keep(kept: tuple[Array, Array], tile: tiles.Tile, raw: Array) -> tuple[Array, Array]:
    if tile.number is None:
        return kept[0], raw
    return jax.lax.dynamic_update_index_in_dim(kept[0], raw, tile.number, 0), kept[1]


def _loss_backward(settings, per_token, saved, gradients):
    of_loss, _ = gradients
    hidden_gradient, head_gradient = (
        (of_loss * g.astype(jnp.float32)).astype(g.dtype) for g in saved
    )
    return hidden_gradient, head_gradient, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)
