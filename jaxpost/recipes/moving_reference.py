"""A reference that follows the policy: trust regions (TR-DPO, arXiv 2404.09656).

After every so many updates the parameters of the reference become

    π_ref ← α π + (1 − α) π_ref

(`mix` is α): a soft update, or with α = 1 a hard one, which puts the policy in its place. What the
reference says of a pair then holds for a moment only, so none of it is kept in a file: each update
has it computed, without gradient, by a copy that is held. That is one more copy of the trained
parameters, in their types, and one more reading of the update. The copy lies in the optimizer's
state: the update that moves the policy moves it, and a checkpoint holds both.

Adapters are replaced and never mixed: a mix of two pairs of factors is not the mix of the matrices
that they stand for.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost import hub, train_step
from jaxpost.options import check_ranges, option
from jaxpost.recipes import reference, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """When and how far the reference moves."""

    every: int = option(64, "move the reference after so many updates", "updates", least=1)
    mix: float = option(
        0.6, "the policy's part in the new reference; 1: it takes its place", above=0, most=1
    )

    def __post_init__(self):
        check_ranges(self, "reference_update.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig(reference.ReferenceConfig):
    """Keys of a reference that may move; then `reference` is where it starts."""

    reference_update: UpdateConfig | None = option(
        None, "move the reference towards the policy (TR-DPO); null: it stays"
    )

    def of_reference(self) -> dict[str, bool]:
        """Which keys are given."""
        names = (f.name for f in dataclasses.fields(ReferenceConfig))
        return {name: getattr(self, name) is not None for name in names}

    def check_reference(self, model: setup.ModelConfig, steps: int) -> None:
        """Raises ValueError for a key that does nothing, and a move that means nothing."""
        moves = self.reference_update
        if moves is None:
            return
        if self.reference_cache is not None:
            raise ValueError(
                "reference_cache is for numbers that stay, and reference_update changes them; "
                "remove one of the two"
            )
        if moves.every >= steps:
            raise ValueError(
                f"reference_update.every is {moves.every}, and of the {steps} updates none comes "
                "after that; make it smaller, or remove reference_update"
            )
        if model.lora is None and model.adapter is None:
            return
        if moves.mix < 1:
            raise ValueError(
                f"reference_update.mix is {moves.mix:g}, and a mix of adapters is not the mix of "
                "the matrices that they stand for; set it to 1, or train without adapters"
            )
        if self.reference is not None:
            raise ValueError(
                "reference_update puts adapters in the place of the reference's, and reference: "
                f"{self.reference} has none; remove reference, or train without adapters"
            )


class Following(NamedTuple):
    """An optimizer's state, with the updates done and the parameters of the reference."""

    done: Array
    optimizer: Any
    reference: Any


def following(
    optimizer: optax.GradientTransformation, config: UpdateConfig | None
) -> optax.GradientTransformation:
    """The optimizer, with a reference that follows; without `config` as it is."""
    if config is None:
        return optimizer
    every, mix = config.every, config.mix

    def init(params: Any) -> Any:
        copy = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return Following(jnp.zeros((), jnp.int32), optimizer.init(params), copy)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = optimizer.update(updates, state.optimizer, params)
        done, new = state.done + 1, optax.apply_updates(params, updates)
        mixed = moved(state.reference, new, mix)
        held = train_step.keep_if(done % every == 0, mixed, state.reference)
        return updates, Following(done, inner, held)

    return optax.GradientTransformation(init, update)


def moved(held: Any, params: Any, mix: float) -> Any:
    """α π + (1 − α) π_ref in float32, in the reference's types."""

    def one(old: Array, new: Array) -> Array:
        mixed = mix * new.astype(jnp.float32) + (1 - mix) * old.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(one, held, params)


def of(state: train_step.TrainState, trainable: Any) -> Params:
    """The parameters of the reference: those held, and the policy's where they are frozen."""
    return train_step.merge(state.opt_state.reference, state.params, trainable)


def started(
    config: Any, policy: setup.Policy, state: train_step.TrainState
) -> train_step.TrainState:
    """The state before the first update, where `config.reference` is what the reference starts as.

    Raises:
      ValueError: that is another architecture than the policy's.
    """
    if config.reference_update is None or config.reference is None:
        return state
    kept = policy.model.config
    model, params = hub.load_model(
        config.reference,
        dtype=config.model.dtype,
        compute_dtype=kept.compute_dtype,
        remat=kept.remat,
    )
    own, other = dataclasses.asdict(kept), dataclasses.asdict(model.config)
    wrong = [f"{key} is {other[key]} and not {own[key]}" for key in own if own[key] != other[key]]
    wrong += unlike(params, state.opt_state.reference)
    if wrong:
        raise ValueError(
            f"reference_update mixes the parameters of policy and reference, and in reference: "
            f"{config.reference} {wrong[0]}; remove reference_update, or take another reference"
        )
    return state._replace(opt_state=state.opt_state._replace(reference=params))


def unlike(params: Params, wanted: Params) -> list[str]:
    """What is wrong with the names, shapes and types of parameters."""
    named = [
        {
            jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (params, wanted)
    ]
    found, needed = named
    return [
        f"{name} is {found.get(name, 'absent')} and not {needed.get(name, 'there')}"
        for name in dict.fromkeys([*needed, *found])
        if found.get(name) != needed.get(name)
    ]
