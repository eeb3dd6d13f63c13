"""What PPO's critic values and how it learns: every token's state, or the prompt alone.

A `Critic` is a record of functions. Its values [B, T] are what its head gives, 0 outside the mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import advantages, loss_weights, losses
from jaxpost.typing import Array


class Told(NamedTuple):
    """What advantages are made of: rewards [B], 0 where missing, and the rest [B, T]."""

    rewards: Array
    kl: Array
    values: Array
    mask: Array  # of completions that have a reward
    trained: Array  # and of these the tokens that are trained
    kl_coef: float


class Critic(NamedTuple):
    """How a critic is used.

    Attributes:
      read: (values of all positions [B, T], completion mask) → those of each token's state.
      worth: values → the rewards that they predict.
      gains: what is told of a rollout → (advantages, returns).
      loss: (values, those before the update, returns, mask) → of each token.
      weights: tokens to train → loss weights.
      moved: (values, before) → where the loss's clip is left; nothing without a clip.
    """

    read: Callable[[Array, Array], Array]
    worth: Callable[[Array], Array]
    gains: Callable[[Told], tuple[Array, Array]]
    loss: Callable[[Array, Array, Array, Array], Array]
    weights: Callable[[Array], Array]
    moved: Callable[[Array, Array], dict[str, Array]]


def of_tokens(config: Any) -> Critic:
    """The reward still to come, at each token; `config` is PPO's."""

    def gains(told: Told) -> tuple[Array, Array]:
        rewards = advantages.token_rewards(told.rewards, told.kl, told.mask, kl_coef=told.kl_coef)
        if config.whiten_rewards:
            rewards = advantages.whiten(rewards, told.mask, shift_mean=False)
        found, returns = advantages.gae(
            rewards, told.values, told.mask, gamma=config.gamma, lam=config.lam
        )
        if config.whiten is not False:
            found = advantages.whiten(found, told.trained)
        return found, returns

    def loss(values: Array, before: Array, returns: Array, mask: Array) -> Array:
        if config.value_loss == "squared":
            return losses.value_squared(values, returns)
        return losses.value_clip(values, before, returns, clip=config.value_clip)

    def moved(values: Array, before: Array) -> dict[str, Array]:
        if config.value_loss == "squared":
            return {}
        return {"val/clipfrac_avg": jnp.abs(values - before) > config.value_clip}

    return Critic(
        read=lambda values, mask: jnp.where(mask, values, 0.0),
        worth=lambda values: values,
        gains=gains,
        loss=loss,
        weights=loss_weights.token_mean,
        moved=moved,
    )


def of_prompts() -> Critic:
    """The probability of success, as a logit at the prompt's last token (arXiv 2604.08865).

    It stands at every token of the completion, and so does the one loss of a prompt. Advantages
    are reward − σ(logit), as they are.
    """

    def read(values: Array, mask: Array) -> Array:
        first = jnp.argmax(mask, axis=1)[:, None]
        return jnp.where(mask, jnp.take_along_axis(values, first, axis=1), 0.0)

    def gains(told: Told) -> tuple[Array, Array]:
        returns = jnp.where(told.mask, told.rewards[:, None], 0.0)
        return jnp.where(told.mask, returns - jax.nn.sigmoid(told.values), 0.0), returns

    def loss(values: Array, before: Array, returns: Array, mask: Array) -> Array:
        return jnp.where(mask, losses.value_bce(values, returns), 0.0)

    return Critic(
        read=read,
        worth=jax.nn.sigmoid,
        gains=gains,
        loss=loss,
        weights=loss_weights.sequence_mean,  # one value a completion, however long
        moved=lambda values, before: {},
    )
