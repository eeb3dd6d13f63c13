"""One architecture with several parameter trees, whose logits are a weighted sum of theirs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.models.model import Cache, Model
from jaxpost.typing import Params


def mixture(model: Model, weights: Mapping[str, float]) -> Model:
    """Logits Σ_name weight · z_name: a geometric mixture of the distributions, exact.

    Parameters are trees by name, {"policy": params, "reference": ref_params}, and so are the
    fields of the cache. Hidden states stand beside each other, [..., n · D]; each part is
    unembedded by its own tree, a soft-cap included. Weights 1.5 and −0.5 lean away from the second
    (arXiv 2409.19605). `head` is one matrix [V, n · D].

    Raises:
      ValueError: `head` is asked for, and the model has a soft-cap.
    """
    names = tuple(weights)

    def init(key) -> Params:
        keys = jax.random.split(key, len(names))
        return {name: model.init(own) for name, own in zip(names, keys, strict=True)}

    def apply(params: Params, tokens, segment_ids=None, positions=None, noise=None):
        of_each = [model.apply(params[n], tokens, segment_ids, positions, noise) for n in names]
        return jnp.concatenate(of_each, axis=-1)

    def head(params: Params):
        if model.config.final_softcap is not None:
            raise ValueError("logits with a soft-cap are not linear, so their mixture has no head")
        return jnp.concatenate([weights[n] * model.head(params[n]) for n in names], axis=-1)

    def unembed(params: Params, hidden):
        parts = jnp.split(hidden, len(names), axis=-1)
        of_each = [model.unembed(params[n], part) for n, part in zip(names, parts, strict=True)]
        scaled = [weights[n] * logits for n, logits in zip(names, of_each, strict=True)]
        return jnp.sum(jnp.stack(scaled), axis=0)

    def init_cache(batch, length, dtype=None) -> Cache:
        return joined({name: model.init_cache(batch, length, dtype) for name in names})

    def decode(params: Params, tokens, cache: Cache, starts):
        read = {n: model.decode(params[n], tokens, own_cache(cache, n), starts) for n in names}
        hidden = jnp.concatenate([read[name][0] for name in names], axis=-1)
        return hidden, joined({name: read[name][1] for name in names})

    return Model(model.config, model.card, init, apply, head, unembed, init_cache, decode)


def joined(caches: Mapping[str, Cache]) -> Cache:
    """One cache, each field of which holds those of several by name."""
    fields: Any = (
        dict(zip(caches, parts, strict=True)) for parts in zip(*caches.values(), strict=True)
    )
    return Cache(*fields)


def own_cache(cache: Any, name: str) -> Cache:
    """The cache of one of the trees."""
    return Cache(*(field[name] for field in cache))
