"""The losses of a pair: what a configuration names, what each looks at, and their weighted sum."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxpost import losses, metrics
from jaxpost.losses import implicit_rewards
from jaxpost.options import option
from jaxpost.recipes import pairwise
from jaxpost.typing import Array


class Sides(NamedTuple):
    """What the loss of a pair is given, [B] each; without a reference its two are 0."""

    chosen: Array
    rejected: Array
    ref_chosen: Array
    ref_rejected: Array
    chosen_lengths: Array
    rejected_lengths: Array


def sides(batch: Any, sums: Array) -> Sides:
    """Of rows [2B]: chosen, rejected, chosen, …; `sums` are the policy's."""
    lengths = jnp.sum(batch.completion_mask, axis=1)
    return Sides(*pairwise.two(sums), *pairwise.two(batch.ref_logps), *pairwise.two(lengths))


class Loss(NamedTuple):
    """A loss, which fields of what is given it takes, and which of the configuration's numbers."""

    function: Callable[..., Array]
    takes: tuple[str, ...]
    numbers: tuple[str, ...]


PAIR = ("chosen", "rejected")
FOUR = (*PAIR, "ref_chosen", "ref_rejected")
LENGTHS = ("chosen_lengths", "rejected_lengths")


def nll(chosen_logps: Array, chosen_lengths: Array) -> Array:
    """[B]: the mean over the chosen completion's tokens."""
    return losses.nll(chosen_logps) / jnp.maximum(chosen_lengths, 1)


LOSSES = {
    "dpo": Loss(losses.dpo, FOUR, ("beta", "label_smoothing")),
    "dpo_norm": Loss(losses.dpo_norm, (*FOUR, *LENGTHS), ("beta",)),
    "robust": Loss(losses.robust, FOUR, ("beta", "label_smoothing")),
    "hinge": Loss(losses.hinge, FOUR, ("beta",)),
    "ipo": Loss(losses.ipo, FOUR, ("beta",)),
    "ipo_average": Loss(losses.ipo_average, (*FOUR, *LENGTHS), ("beta",)),
    "exo": Loss(losses.exo, FOUR, ("beta", "label_smoothing")),
    "discopop": Loss(losses.discopop, FOUR, ("beta",)),
    "dpop": Loss(losses.dpop, FOUR, ("beta", "penalty")),
    "nca": Loss(losses.nca, FOUR, ("beta",)),
    "bco_pair": Loss(losses.bco_pair, FOUR, ("beta",)),
    "sppo_hard": Loss(losses.sppo_hard, FOUR, ("beta",)),
    "apo_zero": Loss(losses.apo_zero, FOUR, ("beta",)),
    "apo_down": Loss(losses.apo_down, FOUR, ("beta",)),
    "aot": Loss(losses.aot, FOUR, ("beta", "label_smoothing")),
    "aot_unpaired": Loss(losses.aot_unpaired, FOUR, ("beta", "label_smoothing")),
    "simpo": Loss(losses.simpo, (*PAIR, *LENGTHS), ("beta", "gamma_beta_ratio", "label_smoothing")),
    "alphapo": Loss(
        losses.alphapo, (*PAIR, *LENGTHS), ("beta", "gamma_beta_ratio", "label_smoothing", "alpha")
    ),
    "orpo": Loss(losses.orpo, (*PAIR, *LENGTHS), ()),
    "cpo": Loss(losses.cpo, PAIR, ("beta", "label_smoothing")),
    "slic": Loss(losses.slic, PAIR, ("delta",)),
    "nll": Loss(nll, ("chosen", "chosen_lengths"), ()),
}
SORTING = ("aot", "aot_unpaired")  # over all pairs of an update
LAST = 1e5  # nats, beyond any log-ratio of completions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Keys of the loss, in every recipe on pairs alike."""

    loss: str | dict[str, float] = option("dpo", "the loss of a pair, or several: {name: weight}")
    beta: float | None = option(
        None, "how strongly the policy is held to the reference; null: the loss's own", above=0
    )
    label_smoothing: float | None = option(
        None, "chance that a pair's label is wrong; null: the loss's own", least=0, below=0.5
    )
    gamma_beta_ratio: float | None = option(
        None, "simpo, alphapo: the margin wanted, over beta; null: 0.5", least=0
    )
    alpha: float | None = option(
        None, "alphapo: shape of the reward; null: 0.25", least=-10, most=10
    )
    penalty: float | None = option(None, "dpop: of a chosen one less likely; null: 50", least=0)
    delta: float | None = option(None, "slic: the margin wanted, in nats; null: 1", above=0)
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha_divergence"] = option(
        "reverse_kl", "from the reference: what a log-ratio stands for (f-DPO)"
    )
    length_weight: float = option(
        1.0, "weight of tokens beyond the shorter completion (LD-DPO)", least=0, most=1
    )
    weigh_by_policy: bool = option(
        False, "weigh a pair by how likely the policy is to write it (WPO)"
    )

    def table(self) -> Mapping[str, Loss]:
        """The losses that there are, by name."""
        return LOSSES

    def losses(self) -> dict[str, float]:
        """Their names and weights."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else dict(self.loss)

    def numbers(self) -> dict[str, float]:
        """The losses' own numbers, as far as they are given."""
        numbers = {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "gamma_beta_ratio": self.gamma_beta_ratio,
            "alpha": self.alpha,
            "penalty": self.penalty,
            "delta": self.delta,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def measured(self) -> bool:
        """Whether a loss looks at a reference."""
        takes = [field for name in self.losses() for field in self.table()[name].takes]
        return any(field.startswith("ref_") for field in takes)

    def check_losses(self, microbatches: int, of_reference: Mapping[str, bool]) -> None:
        """Raises ValueError for a name that is not known, and for a key that does nothing.

        `of_reference`: further keys that are for a reference, and whether they are given.
        """
        if not self.losses():
            raise ValueError("loss is empty: name one, or several as {name: weight}")
        pairwise.check_names("loss", self.losses(), self.table())
        used = {number for name in self.losses() for number in self.table()[name].numbers}
        for key, value in self.numbers().items():
            if key not in used:
                raise ValueError(f"{key} is {value}, which loss: {self.loss} does not look at")
        if microbatches > 1 and any(name in SORTING for name in self.losses()):
            raise ValueError("aot compares all pairs of an update; set microbatches to 1")
        free = {**of_reference, "divergence": self.divergence != "reverse_kl"}
        if not self.measured() and any(free.values()):
            key = next(key for key, given in free.items() if given)
            raise ValueError(f"loss: {self.loss} has no reference; remove {key}")


def pair_loss(
    config: LossConfig,
    sides: Sides,
    counted: Array | None = None,
    further: Mapping[str, Array] | None = None,
) -> Array:
    """[B]: the weighted losses of each pair.

    `counted` [B] are the pairs that count, by default all; the losses of the others mean nothing.
    `further` is what losses beyond `LOSSES` take.
    """
    whole, total = diverging(config, sides), jnp.zeros(len(sides.chosen))
    ranked = whole if counted is None else ranked_last(whole, counted)
    for name, weight in config.losses().items():
        compared, loss = ranked if name in SORTING else whole, config.table()[name]
        given = {**compared._asdict(), **(further or {})}
        numbers = {key: value for key, value in config.numbers().items() if key in loss.numbers}
        total += weight * loss.function(*(given[field] for field in loss.takes), **numbers)
    if config.weigh_by_policy:
        total *= implicit_rewards.pair_weights(
            sides.chosen, sides.rejected, sides.chosen_lengths, sides.rejected_lengths
        )
    return total


def ranked_last(sides: Sides, counted: Array) -> Sides:
    """Pairs that do not count with log-ratios above all others, so that no other's rank moves."""
    chosen, rejected, ref_chosen, ref_rejected = (
        jnp.where(counted, side, rank * LAST)
        for side, rank in zip(sides[:4], (2.0, 1.0, 1.0, 0.0), strict=True)
    )
    return Sides(chosen, rejected, ref_chosen, ref_rejected, *sides[4:])


def diverging(config: LossConfig, sides: Sides) -> Sides:
    """With another divergence its derivative takes the place of log π/π_ref (f-DPO)."""
    if config.divergence == "reverse_kl":
        return sides
    derivative = {
        "forward_kl": implicit_rewards.forward_kl,
        "jensen_shannon": implicit_rewards.jensen_shannon,
        "alpha_divergence": implicit_rewards.alpha_divergence,
    }[config.divergence]
    nought = jnp.zeros_like(sides.chosen)
    return sides._replace(
        chosen=derivative(sides.chosen, sides.ref_chosen),
        rejected=derivative(sides.rejected, sides.ref_rejected),
        ref_chosen=nought,
        ref_rejected=nought,
    )


def measures(config: LossConfig, sides: Sides, weights: Array) -> dict[str, Array]:
    """Sums over the pairs that count, and their number."""
    beta = 0.1 if config.beta is None else config.beta
    chosen = beta * (sides.chosen - sides.ref_chosen)
    rejected = beta * (sides.rejected - sides.ref_rejected)
    per_pair = {
        "pairs": jnp.ones_like(chosen),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": metrics.preference_accuracy(chosen, rejected),
        "logps/chosen": sides.chosen,
        "logps/rejected": sides.rejected,
    }
    return {name: jnp.sum(jnp.where(weights != 0, x, 0.0)) for name, x in per_pair.items()}
