"""One optimizer update as a pure function of the state and the batch."""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost.typing import Array, Bool, Params

Objective = Callable[[Params, Any], tuple[Array, dict[str, Array]]]


class Divided(NamedTuple):
    """A part of a batch that is divided already: entry i of its leaves [M, …] is microbatch i's."""

    parts: Any


class TrainState(NamedTuple):
    """All that an update changes.

    Attributes:
      step: updates done so far, int32.
      params: the parameters, frozen ones included.
      opt_state: the optimizer's state, of the trainable parameters only.
      ema: exponential moving average of the trainable parameters, float32, or None.
    """

    step: Array
    params: Params
    opt_state: Any
    ema: Any


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    *,
    trainable: Any = None,
    ema: bool = False,
) -> TrainState:
    """The state before the first update. `trainable` is a tree of bools like `params`."""
    chosen = select(params, trainable)
    average = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), chosen) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(chosen), average)


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    trainable: Any = None,
    ema_decay: float | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]:
    """`train_step(state, batch) -> (state, metrics)`; jit it with `donate_argnums=0`.

    `objective(params, batch)` returns a loss that is already a weighted sum over the whole update,
    and metrics that are sums too; microbatch values are added and nothing is divided, so the result
    does not depend on `microbatches`. Microbatch i takes rows i, i + microbatches, …, so splitting
    a sharded batch moves no data. Scalars in the batch go to every microbatch, and of what is
    `Divided` each gets its entry.

    With `trainable` (a tree of bools like the parameters) the rest is frozen: it gets no gradient
    and no optimizer state. Where loss or gradient is not finite the state is returned unchanged
    but for its step, and the metrics say so.

    Metrics: the objective's, and `loss`, `grad_norm` (global, before any clipping).

    Raises:
      ValueError: the batch cannot be split into that many microbatches; the objective has a metric
        of one of those two names; only one of `ema_decay` and `init_state`'s `ema` was given.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}; it must be at least 1")

    def value_and_grad(params: Params, batch: Any):
        def loss_of(chosen):
            return objective(merge(chosen, params, trainable), batch)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            select(params, trainable)
        )
        check_names(metrics)
        return gradients, {"loss": loss, **metrics}

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        check_average(state.ema, ema_decay)
        gradients, metrics = accumulate(value_and_grad, state.params, batch, microbatches)
        chosen = select(state.params, trainable)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
        updates, opt_state = optimizer.update(gradients, state.opt_state, chosen)
        updated = optax.apply_updates(chosen, updates)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        average = state.ema
        if ema_decay is not None:
            average = moving_average(average, updated, ema_decay)
        updated, opt_state, average = keep_if(
            finite, (updated, opt_state, average), (chosen, state.opt_state, state.ema)
        )
        params = merge(updated, state.params, trainable)
        return TrainState(state.step + 1, params, opt_state, average), {
            **metrics,
            "grad_norm": norm,
        }

    return train_step


def accumulate(function: Callable[..., Any], params: Params, batch: Any, microbatches: int) -> Any:
    """Sum of `function(params, microbatch)` over the strided microbatches, in float32."""
    if microbatches == 1:
        return function(params, jax.tree.map(whole, batch, is_leaf=is_divided))
    parts = split(batch, microbatches)
    shapes = jax.eval_shape(function, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, "float32")), shapes
    )

    def add(total, part):
        return jax.tree.map(lambda t, x: t + x, total, function(params, part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def check_names(metrics: Mapping[str, Any]) -> None:
    """Refuses a metric that would stand in the place of one of `make_train_step`'s own."""
    taken = sorted({"loss", "grad_norm"} & metrics.keys())
    if taken:
        raise ValueError(
            f"the objective returns a metric of the name {' and '.join(taken)}, under which the "
            "train step reports its own; give it another name"
        )


def check_average(ema: Any, decay: float | None) -> None:
    """Refuses a moving average without its decay, and the reverse."""
    if (ema is None) != (decay is None):
        given, other = (
            (f"make_train_step(ema_decay={decay})", "init_state(ema=True)")
            if ema is None
            else ("init_state(ema=True)", "make_train_step(ema_decay=...)")
        )
        raise ValueError(f"{given} needs {other} too: a moving average is kept with both")


def check_microbatches(rows: int, microbatches: int) -> None:
    """Raises ValueError where rows cannot be divided among the microbatches."""
    if rows % microbatches:
        choices = [m for m in range(1, rows + 1) if rows % m == 0]
        raise ValueError(
            f"batch of {rows} rows cannot be split into {microbatches} microbatches; "
            f"use one of {choices}"
        )


def split(batch: Any, microbatches: int) -> Any:
    """Rows i, i + M, i + 2M, … become microbatch i: leaves [B, ...] → [M, B/M, ...].

    Raises:
      ValueError: B is not the same everywhere, or not a multiple of M.
    """
    rows = rows_of(batch)
    check_microbatches(rows, microbatches)

    def strided(x):
        if is_divided(x):
            return x.parts
        if jnp.ndim(x) == 0:
            return jnp.broadcast_to(x, (microbatches,))
        return jnp.moveaxis(x.reshape(rows // microbatches, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree.map(strided, batch, is_leaf=is_divided)


def is_divided(x: Any) -> bool:
    return isinstance(x, Divided)


def whole(x: Any) -> Any:
    """Of what is `Divided` the only entry."""
    return jax.tree.map(lambda leaf: leaf[0], x.parts) if is_divided(x) else x


def rows_of(batch: Any) -> int:
    """The number of rows that all arrays of a batch have in common; scalars have none."""
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_divided)
    leaves = [(path, x) for path, x in leaves if not is_divided(x)]
    found = [(path, x.shape) for path, x in leaves if jnp.ndim(x)]
    if not found:
        return 0
    rows = collections.Counter(shape[0] for _, shape in found).most_common(1)[0][0]
    for path, shape in found:
        if shape[0] != rows:
            raise ValueError(
                f"microbatches share the batch's rows, but its leaf {jax.tree_util.keystr(path)} "
                f"has the shape {shape} and the others have {rows} rows; give it one entry a row, "
                "or a scalar for all (a random key: jax.random.key)"
            )
    return rows


def select(params: Any, trainable: Any) -> Any:
    """The trainable parameters; None in the place of frozen ones."""
    if trainable is None:
        return params
    return jax.tree.map(lambda keep, p: p if keep else None, trainable, params)


def merge(chosen: Any, params: Any, trainable: Any) -> Any:
    """The whole tree again: `chosen` where trainable, `params` elsewhere."""
    if trainable is None:
        return chosen
    return jax.tree.map(
        lambda keep, new, old: new if keep else old,
        trainable,
        chosen,
        params,
        is_leaf=lambda x: x is None,
    )


def keep_if(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def moving_average(average: Any, params: Any, decay: float) -> Any:
    """ema ← decay · ema + (1 − decay) · params, in float32."""
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), average, params)
