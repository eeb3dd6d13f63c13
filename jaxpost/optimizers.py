"""Optimizers and schedules: optax's, chosen by a configuration, aware of stacked layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from optax import contrib

from jaxpost.options import option

DECAYED = ("kernel", "lora_a", "lora_b", "embedding", "lm_head")
Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and how its learning rate goes."""

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = option(
        "adamw", "the optimizer; muon orthogonalises matrices and leaves the rest to AdamW"
    )
    learning_rate: float = option(2e-5, "the highest learning rate, reached after the warm-up")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = option(
        "cosine", "after the warm-up: constant, down a line or a cosine, or stable then down (wsd)"
    )
    warmup: int = option(0, "updates in which the rate rises from 0", "updates")
    end_fraction: float = option(0.0, "the last learning rate, as a part of the highest")
    decay_fraction: float = option(0.2, "wsd: the part of the run in which the rate falls")
    weight_decay: float = option(0.0, "decoupled decay of matrices; norms and biases have none")
    b1: float = option(0.9, "decay of the first moment (momentum of lion, muon, sgd)")
    b2: float = option(0.999, "decay of the second moment")
    eps: float = option(1e-8, "added to the root of the second moment")
    max_grad_norm: float | None = option(1.0, "gradients are scaled down to this global norm")

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}; it must be above 0")
        if self.warmup < 0:
            raise ValueError(f"optimizer.warmup is {self.warmup}; it counts updates, from 0 up")
        for name in ("end_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it lies in 0 … 1")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError("optimizer.max_grad_norm must be above 0, or null for no clipping")
        if self.name == "adafactor" and self.weight_decay:
            raise ValueError("optimizer.weight_decay is not for adafactor; set it to 0")


def make_optimizer(
    config: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer and its schedule `step -> learning rate` (step 0 is the first update).

    Gradients are clipped to `max_grad_norm` first. Moments have the type of the parameters. Frozen
    parameters are `None` in the trees that arrive here.

    Raises:
      ValueError: the warm-up is as long as the run.
    """
    schedule = make_schedule(config, steps)
    clip = [] if config.max_grad_norm is None else [clip_by_global_norm(config.max_grad_norm)]
    return optax.chain(*clip, rule(config, schedule)), schedule


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """From 0 up a line over `warmup` updates to the highest rate, then as the schedule says."""
    if config.warmup >= steps:
        raise ValueError(f"optimizer.warmup is {config.warmup} of {steps} updates; make it shorter")
    peak, end = config.learning_rate, config.learning_rate * config.end_fraction
    rest = steps - config.warmup
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, config.end_fraction)
    else:
        falling = max(1, round(config.decay_fraction * steps))
        after = optax.linear_schedule(peak, end, falling, max(0, rest - falling))
    if config.warmup == 0:
        return after
    rising = optax.linear_schedule(0.0, peak, config.warmup)
    return optax.join_schedules([rising, after], [config.warmup])


def rule(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """The optimizer itself."""
    decay: dict[str, Any] = {"weight_decay": config.weight_decay}
    if config.name == "adamw":
        return optax.adamw(
            schedule, config.b1, config.b2, config.eps, mask=is_decayed, **decay
        )
    if config.name == "lion":
        return optax.lion(schedule, config.b1, config.b2, mask=is_decayed, **decay)
    if config.name == "adafactor":
        # Factored over the two largest axes of a stack, which are those of its matrices.
        return optax.adafactor(schedule)
    if config.name == "sgd":
        decayed = optax.add_decayed_weights(config.weight_decay, is_decayed)
        return optax.chain(decayed, optax.sgd(schedule, momentum=config.b1 or None))
    return contrib.muon(
        schedule,
        beta=config.b1,
        adam_b1=config.b1,
        adam_b2=config.b2,
        eps=config.eps,
        weight_decay_mask=is_decayed,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=stacked_matrices,
        consistent_rms=0.2,  # updates as large as AdamW's, so its learning rates carry over
        **decay,
    )


def clip_by_global_norm(highest: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, highest / norm), with the norm summed in float32."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(gradients)
        scale = jax.numpy.minimum(1.0, highest / jax.numpy.maximum(norm, 1e-30))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: Any) -> jax.Array:
    """√(Σ x²) over all leaves, in float32."""
    return optax.global_norm(jax.tree.map(lambda x: x.astype(jax.numpy.float32), tree))


def is_decayed(params: Any) -> Any:
    """True on matrices, by name: a stack of norm scales has two axes and is none."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def stacked_matrices(params: Any) -> Any:
    """Muon's axes for projections [layers, in, out], which it treats layer by layer; else None."""
    matrix = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    names = ("kernel", "lora_a", "lora_b")
    return jax.tree.map_with_path(
        lambda path, _: matrix if path[-1].key in names else None, params
    )
