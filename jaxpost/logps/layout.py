"""Where the masked tokens of a batch lie, so that only they are scored."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Mask


class Layout(NamedTuple):
    """Each row's masked positions moved to its front, and how many chunks hold them all."""

    order: Array  # [B, n * size], indices into T
    inverse: Array  # [B, T], indices into n * size
    used: Array  # [B, n * size], whether a masked position lies there
    size: int  # positions of a row in one chunk
    chunks: Array  # scalar: chunks that hold a masked position

    def pack(self, x: Array) -> Array:
        """x [B, T, ...] in this order: [B, n * size, ...]."""
        order = self.order.reshape(*self.order.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, order, axis=1)

    def restore(self, x: Array, mask: Mask) -> Array:
        """The inverse of `pack`, with 0 outside the mask."""
        rest = (1,) * (x.ndim - 2)
        x = jnp.take_along_axis(x, self.inverse.reshape(*self.inverse.shape, *rest), axis=1)
        return jnp.where(mask.reshape(*mask.shape, *rest), x, jnp.zeros((), x.dtype))


def layout_of(mask: Mask, chunk: int) -> Layout:
    """The layout for chunks of about `chunk` tokens over all rows."""
    batch, length = mask.shape
    size = min(length, max(1, chunk // batch))
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    order = jnp.pad(order, ((0, 0), (0, -length % size)), mode="edge")
    counts = jnp.sum(mask, axis=1)
    used = jnp.arange(order.shape[1]) < counts[:, None]
    return Layout(order, inverse, used, size, (jnp.max(counts) + size - 1) // size)


def cut(x: Array, index: Array, size: int) -> Array:
    """Chunk `index` of x [B, n * size, ...], rows and positions joined: [B * size, ...]."""
    part = jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
    return part.reshape(-1, *x.shape[2:])


def paste(x: Array, part: Array, index: Array, size: int) -> Array:
    """x with chunk `index` replaced: the inverse of `cut`."""
    part = part.reshape(x.shape[0], size, *x.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), index * size, axis=1)
