"""Optimizers and schedules: optax's, chosen by a configuration, aware of stacked layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxpost.options import check_ranges, option

PROJECTIONS = ("kernel", "lora_a", "lora_b")
DECAYED = (*PROJECTIONS, "embedding", "lm_head")
Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and how its learning rate goes."""

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = option(
        "adamw", "the optimizer; muon orthogonalises projections and leaves the rest to AdamW"
    )
    learning_rate: float = option(
        2e-5, "the highest learning rate, reached after the warm-up", above=0
    )
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = option(
        "cosine",
        "after the warm-up: constant, down a line or a cosine, stable then down a line (wsd), or "
        "falling as 1/sqrt(step)",
    )
    warmup: int = option(0, "updates in which the rate rises from 0", "updates", least=0)
    end_fraction: float = option(
        0.0, "the last learning rate, as a part of the highest", least=0, most=1
    )
    decay_fraction: float = option(
        0.2, "wsd: the part of the run in which the rate falls", least=0, most=1
    )
    weight_decay: float = option(
        0.0, "decoupled decay of matrices; norms and biases have none", least=0
    )
    b1: float | None = option(
        None,
        "decay of the first moment; null: 0.9 (adamw, lion, sgd's momentum), 0.95 (muon)",
        least=0,
        below=1,
    )
    b2: float | None = option(
        None,
        "decay of the second moment; null: 0.999 (adamw, muon's AdamW), 0.99 (lion)",
        least=0,
        below=1,
    )
    eps: float | None = option(
        None, "adamw, muon: added to the root of the second moment; null: 1e-8", above=0
    )
    max_grad_norm: float | None = option(
        1.0, "gradients are scaled down to this global norm; null: they are not", above=0
    )

    def __post_init__(self):
        check_ranges(self, "optimizer.")
        for key, value in {"b1": self.b1, "b2": self.b2, "eps": self.eps}.items():
            if value is not None and self.name not in USED_BY[key]:
                names = ", ".join(USED_BY[key])
                raise ValueError(f"optimizer.{key} is a key of {names}; remove it for {self.name}")
        if self.schedule in ("constant", "inverse_sqrt") and self.end_fraction:
            raise ValueError(f"optimizer.end_fraction is not for the schedule {self.schedule}")
        if self.schedule != "wsd" and self.decay_fraction != 0.2:
            raise ValueError("optimizer.decay_fraction is for optimizer.schedule: wsd")
        if self.schedule == "inverse_sqrt" and not self.warmup:
            raise ValueError("optimizer.schedule: inverse_sqrt needs optimizer.warmup above 0")


# The optimizers that know a key whose default is null.
USED_BY = {
    "b1": ("adamw", "lion", "muon", "sgd"),
    "b2": ("adamw", "lion", "muon"),
    "eps": ("adamw", "muon"),
}


def make_optimizer(
    config: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer and its schedule `step -> learning rate` (step 0 is the first update).

    Gradients are first clipped to the global norm `max_grad_norm`; all arithmetic and state are
    float32 (see `in_float32`). Frozen parameters are `None` in the trees that arrive here.

    Raises:
      ValueError: the warm-up is as long as the run.
    """
    schedule = make_schedule(config, steps)
    return following(config, schedule), schedule


def following(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """The optimizer under another schedule.

    In a jitted update `lambda count: rate`, with the rate as an input, keeps the schedule's numbers
    out of the program: more steps then need no new one.
    """
    parts = [rule(config), optax.scale_by_learning_rate(schedule)]
    if config.max_grad_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    return in_float32(optax.chain(*parts))


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """From 0 up a line over `warmup` updates to the highest rate, then as the schedule says."""
    check_warmup(config, steps)
    if config.warmup == 0:
        return after_warmup(config, steps)
    rising = optax.linear_schedule(0.0, config.learning_rate, config.warmup)
    return optax.join_schedules([rising, after_warmup(config, steps)], [config.warmup])


def check_warmup(config: OptimizerConfig, steps: int) -> None:
    """Raises ValueError where the warm-up is as long as the run."""
    if config.warmup >= steps:
        raise ValueError(f"optimizer.warmup is {config.warmup} of {steps} updates; make it shorter")


def after_warmup(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate, counted from the end of the warm-up; the end rate is that of `steps`."""
    peak, rest = config.learning_rate, steps - config.warmup
    end = peak * config.end_fraction
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, end, rest)
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, rest, config.end_fraction)
    if config.schedule == "inverse_sqrt":
        # The joined schedule also asks for steps before the warm-up's end, and drops the answer.
        return lambda step: peak * jnp.sqrt(config.warmup / (config.warmup + jnp.maximum(step, 0)))
    falling = min(max(1, round(config.decay_fraction * steps)), rest)
    return optax.linear_schedule(peak, end, falling, rest - falling)


def rule(config: OptimizerConfig) -> optax.GradientTransformation:
    """From gradients to directions, of which an update takes −learning rate; decay included."""
    b1 = config.b1 if config.b1 is not None else 0.95 if config.name == "muon" else 0.9
    b2 = config.b2 if config.b2 is not None else 0.99 if config.name == "lion" else 0.999
    eps = 1e-8 if config.eps is None else config.eps
    if config.name == "adamw":
        direction = optax.scale_by_adam(b1, b2, eps)
    elif config.name == "lion":
        direction = optax.scale_by_lion(b1, b2)
    elif config.name == "adafactor":
        direction = adafactor()
    elif config.name == "muon":
        direction = muon(b1, b2, eps)
    else:
        direction = optax.trace(b1)
    if not config.weight_decay:
        return direction
    return optax.chain(direction, optax.add_decayed_weights(config.weight_decay, is_decayed))


def adafactor() -> optax.GradientTransformation:
    """Adafactor's direction (arXiv 1804.04235), matrix by matrix: no axis of layers is factored.

    Departs from the paper in that the step is not multiplied with the parameter's own size, so
    that learning rates mean what they mean for AdamW.
    """
    direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return optax.partition({"stack": each_layer(direction), "single": direction}, in_stack)


def muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Muon's direction for the projections of each layer, AdamW's for all else.

    Directions are as large as AdamW's (arXiv 2502.16982, eq. 4), so its learning rates carry over.
    """
    # optax applies −learning rate within: −1 is what gives back the direction.
    matrices = contrib.muon(
        -1.0,
        beta=b1,
        eps=eps,
        muon_weight_dimension_numbers=stacked_matrices,
        consistent_rms=0.2,
    )
    others = optax.scale_by_adam(0.9, b2, eps)
    return optax.partition({"muon": matrices, "adam": others}, projection_or_not)


def each_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Treats every layer of stacked leaves [L, ...] as parameters of its own."""

    def init(params: Any) -> Any:
        return jax.vmap(inner.init)(params) if jax.tree.leaves(params) else inner.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not jax.tree.leaves(updates):
            return updates, state
        return jax.vmap(inner.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


class MasterState(NamedTuple):
    """State of `in_float32`: float32 copies of the parameters of a lower precision, else None."""

    master: Any
    inner: Any


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs an optimizer in float32, whatever the types of parameters and gradients.

    Parameters of a lower precision get a float32 master copy, which the updates go to; they follow
    it, rounded. Else a bfloat16 parameter would not move at all for updates under 1/256 of it, nor
    its second moment for b2 above 0.99. Float32 parameters need no copy.
    """

    def init(params: Any) -> MasterState:
        lower = jax.tree.map(lambda p: jnp.finfo(p.dtype).bits < 32, params)
        master = jax.tree.map(lambda low, p: as_float32(p) if low else None, lower, params)
        return MasterState(master, inner.init(jax.tree.map(as_float32, params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("pass the parameters too: update(updates, state, params)")
        exact = over(lambda copy, p: p if copy is None else copy, state.master, params)
        changes, inner_state = inner.update(jax.tree.map(as_float32, updates), state.inner, exact)
        master = over(lambda copy, c: None if copy is None else copy + c, state.master, changes)
        changes = over(
            lambda copy, c, p: c if copy is None else copy - as_float32(p), master, changes, params
        )
        return changes, MasterState(master, inner_state)

    return optax.GradientTransformation(init, update)


def over(function: Callable[..., Any], *trees: Any) -> Any:
    """`jax.tree.map` in which the first tree's Nones are leaves."""
    return jax.tree.map(function, *trees, is_leaf=lambda x: x is None)


def as_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def is_decayed(params: Any) -> Any:
    """True on matrices, by name: a stack of norm scales has two axes and is none."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def projection_or_not(params: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, _: "muon" if path[-1].key in PROJECTIONS else "adam", params
    )


def in_stack(params: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, _: "stack" if "layers" in [key.key for key in path] else "single", params
    )


def side_by_side(
    parts: dict[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """An optimizer for each branch of the parameters, with its own clipping."""

    def init(params: Any) -> Any:
        return {name: part.init(params[name]) for name, part in parts.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        done = {
            name: part.update(updates[name], state[name], params[name])
            for name, part in parts.items()
        }
        return {n: changes for n, (changes, _) in done.items()}, {
            n: s for n, (_, s) in done.items()
        }

    return optax.GradientTransformation(init, update)


class RestingState(NamedTuple):
    """State of `resting`: the updates seen so far."""

    count: Any
    inner: Any


def resting(inner: optax.GradientTransformation, asleep: int) -> optax.GradientTransformation:
    """Changes nothing in the first `asleep` updates, then is `inner` from its start."""
    if not asleep:
        return inner

    def init(params: Any) -> RestingState:
        return RestingState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RestingState]:
        changes, moved = inner.update(updates, state.inner, params)
        awake = state.count >= asleep
        changes = jax.tree.map(lambda c: jnp.where(awake, c, 0.0), changes)
        kept = jax.tree.map(lambda new, old: jnp.where(awake, new, old), moved, state.inner)
        return changes, RestingState(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


def restarted(optimizer: optax.GradientTransformation, opt_state: Any, params: Any) -> Any:
    """The optimizer's state as at the start, but for what is no memory of gradients.

    How far the learning rate's schedule is stays, and so do the float32 copies of parameters: anew
    from rounded ones they would lose every change under the parameters' precision.
    """

    def is_kept(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState | MasterState)

    def again(old: Any, new: Any) -> Any:
        if isinstance(old, MasterState):
            return MasterState(old.master, over_states(old.inner, new.inner))
        return old if is_kept(old) else new

    def over_states(old: Any, new: Any) -> Any:
        return jax.tree.map(again, old, new, is_leaf=is_kept)

    return over_states(opt_state, optimizer.init(params))


def stacked_matrices(params: Any) -> Any:
    """Muon's axes of projections [layers, in, out]; layers are treated one by one."""
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(1, 2), params)
