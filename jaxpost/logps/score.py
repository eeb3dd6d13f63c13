"""Scores of hidden states, and their gradients, with the logits computed again backward."""

import jax
import jax.numpy as jnp

from jaxpost.logps import layout, tiles
from jaxpost.logps.settings import Settings, TokenScores
from jaxpost.typing import Array, Float, Hidden, Int, Mask, Tokens


def score_hidden(
    hidden: Hidden, head: Float[Array, "V D"], targets: Tokens, mask: Mask, settings: Settings
) -> TokenScores:
    """Scores of `targets` [B, T] under `softmax(transform(hidden @ head.T))`, where `mask`."""
    laid = layout.layout_of(mask, settings.chunk)
    scores = _score(settings, laid.size, laid.pack(hidden), head, laid.pack(targets), laid.chunks)
    return TokenScores(*(laid.restore(field, mask) for field in scores))


def _score_plain(
    settings: Settings,
    size: int,
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    chunks: Int[Array, ""],
) -> TokenScores:
    def score(tile, hidden, head, targets, chunks):
        def score_chunk(index, scores):
            here, wanted = (layout.cut(x, index, size) for x in (hidden, targets))

            def add(tile: tiles.Tile, so_far: tiles.Running) -> tiles.Running:
                return tiles.add_logits(
                    settings, so_far, tiles.project(here, tile), tile.start, wanted
                )

            found = tiles.over_tiles(tile, head, add, tiles.running(wanted))
            values = tiles.scores_of(settings, found)
            return jax.tree.map(lambda x, part: layout.paste(x, part, index, size), scores, values)

        zeros = jnp.zeros(targets.shape, jnp.float32)
        return jax.lax.fori_loop(0, chunks, score_chunk, TokenScores(zeros, zeros, zeros, zeros))

    return tiles.by_platform(score, settings, hidden, head.astype(hidden.dtype), targets, chunks)


_score = jax.custom_vjp(_score_plain, nondiff_argnums=(0, 1))


def _score_forward(settings, size, hidden, head, targets, chunks):
    scores = _score(settings, size, hidden, head, targets, chunks)
    return scores, (hidden, head, targets, chunks, scores)


def _score_backward(settings, size, saved, gradients):
    def back(tile, hidden, head, chunks, targets, scores, gradients):
        def add_chunk(index, carry):
            hidden_gradient, head_gradient = carry
            here, wanted, known, of_scores = jax.tree.map(
                lambda x: layout.cut(x, index, size), (hidden, targets, scores, gradients)
            )

            def add(tile: tiles.Tile, carry):
                gradient = tiles.raw_gradient(
                    settings,
                    tiles.project(here, tile),
                    tile.start,
                    wanted,
                    known,
                    of_scores,
                )
                return tiles.add_gradient(tile, here, gradient, carry)

            start = (jnp.zeros(here.shape, jnp.float32), head_gradient)
            part, head_gradient = tiles.over_tiles(tile, head, add, start)
            return layout.paste(hidden_gradient, part, index, size), head_gradient

        start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        return jax.lax.fori_loop(0, chunks, add_chunk, start)

    hidden, head, targets, chunks, scores = saved
    hidden_gradient, head_gradient = tiles.by_platform(
        back,
        settings,
        hidden,
        head.astype(hidden.dtype),
        chunks,
        targets,
        scores,
        tiles.ScoreGradients(gradients.logps, gradients.log_normalizers, gradients.entropies),
    )
    return hidden_gradient, head_gradient.astype(head.dtype), None, None


_score.defvjp(_score_forward, _score_backward)
