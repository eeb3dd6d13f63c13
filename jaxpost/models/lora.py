"""Low-rank adapters on a model's projections: added, told apart from the rest, folded in.

Formula and scale are in `LoRA`. Adapters live in the same tree as the weights, as the leaves
`lora_a` and `lora_b` beside a projection's `kernel`.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.models import transformer
from jaxpost.models.model import LoRA, Model
from jaxpost.typing import Array, Params

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEAVES = ("lora_a", "lora_b")


def add_lora(model: Model, params: Params, lora: LoRA, key: Array) -> tuple[Model, Params]:
    """The model with fresh adapters: A uniform in ±1/√in, B zero, so its logits are unchanged.

    Adapters are float32 whatever type the weights have, since they are what is trained. The A of a
    projection depends on `key` and the projection only, not on which others are adapted.

    Raises:
      ValueError: a target that matches no projection, a rank below 1, or adapters already there.
    """
    if has_lora(params):
        raise ValueError("the parameters already hold LoRA adapters; merge them first")
    check(lora)
    layers = dict(params["layers"])
    for index, name in enumerate(PROJECTIONS):
        adapter = transformer.lora_rank_and_scale(lora, name)
        if adapter is not None:
            shapes = leaf_shapes(params, name, adapter[0])
            bound = 1 / math.sqrt(shapes["lora_a"][1])
            a = jax.random.uniform(
                jax.random.fold_in(key, index), shapes["lora_a"], minval=-bound, maxval=bound
            )
            layers[name] = {**layers[name], "lora_a": a, "lora_b": jnp.zeros(shapes["lora_b"])}
    return with_lora(model, lora), {**params, "layers": layers}


def leaf_shapes(params: Params, name: str, rank: int) -> dict[str, tuple[int, int, int]]:
    """Shapes of a projection's adapter: A [layers, in, rank] and B [layers, rank, out]."""
    depth, d_in, d_out = params["layers"][name]["kernel"].shape
    return {"lora_a": (depth, d_in, rank), "lora_b": (depth, rank, d_out)}


def with_lora(model: Model, lora: LoRA | None) -> Model:
    """The same architecture with other adapters (or none); parameters are the caller's matter."""
    return transformer.make_model(dataclasses.replace(model.config, lora=lora), model.card)


def check(lora: LoRA) -> None:
    """Raises ValueError for targets, ranks and alphas that fit no model."""
    for target in lora.targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise ValueError(
                f"LoRA target {target!r} is not a regular expression: {error}"
            ) from error
        if not any(pattern.fullmatch(name) for name in PROJECTIONS):
            raise ValueError(
                f"LoRA target {target!r} matches no projection; they are {', '.join(PROJECTIONS)}"
            )
    for name, value in (*lora.ranks, *lora.alphas):
        if transformer.lora_rank_and_scale(lora, name) is None or name not in PROJECTIONS:
            raise ValueError(f"LoRA rank or alpha {value} is for {name!r}, which is not a target")
    for name, rank in (("rank", lora.rank), *lora.ranks):
        if rank < 1:
            raise ValueError(f"LoRA rank of {name} is {rank}; it must be at least 1")
    if not lora.targets:
        raise ValueError(f"LoRA without targets; choose from {', '.join(PROJECTIONS)}")


def has_lora(params: Params) -> bool:
    return any(jax.tree.leaves(trainable(params)))


def trainable(params: Params) -> Any:
    """A tree like `params` that is True on the adapters and False elsewhere."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in LEAVES, params)


def merge(model: Model, params: Params) -> tuple[Model, Params]:
    """The model with every adapter folded into its kernel, W + scale · A B (summed in float32)."""
    layers = dict(params["layers"])
    for name, leaves in layers.items():
        adapter = transformer.lora_rank_and_scale(model.config.lora, name)
        if adapter is not None and "lora_a" in leaves:
            rest = {leaf: value for leaf, value in leaves.items() if leaf not in LEAVES}
            kernel = folded(leaves["kernel"], leaves["lora_a"], leaves["lora_b"], adapter[1])
            layers[name] = {**rest, "kernel": kernel}
    return with_lora(model, None), {**params, "layers": layers}


def folded(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    """One layer at a time, so that no second stack of kernels exists in float32."""

    def one(layer: tuple[Array, Array, Array]) -> Array:
        w, a, b = (x.astype(jnp.float32) for x in layer)
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (w + scale * product).astype(kernel.dtype)

    return jax.lax.map(one, (kernel, a, b))
