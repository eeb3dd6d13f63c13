"""Advantages and returns over the tokens of a completion: [B, T], 0 outside the mask, constants.

Tokens outside `mask` (observations, tools, padding) are no steps: what a token leads to is the next
token of the policy's own, across the gap. With `segment_ids` rows hold several sequences; nothing
crosses from one to the next.
"""

import jax
import jax.numpy as jnp

from jaxpost.advantages import groups
from jaxpost.typing import Array, Bool, Float, Int, Mask, PerToken, Shaped

Segments = Int[Array, "*B T"]


def gae(
    rewards: PerToken,
    values: PerToken,
    mask: Mask,
    *,
    gamma: float,
    lam: float,
    segment_ids: Segments | None = None,
) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) → (advantages, returns).

    δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γ λ A_{t+1}, R_t = A_t + V_t, with V = 0 after the last
    token. V_t is the value of the state before token t. Where a completion was cut short, add
    γ · (value of its last state) to its last reward. Whiten the advantages alone, afterwards.
    """

    def step(carry, token):
        reward, value, chosen, ends = token
        next_value, advantage = (jnp.where(ends, 0.0, later) for later in carry)
        here = reward - value + gamma * (next_value + lam * advantage)
        carry = jnp.where(chosen, value, next_value), jnp.where(chosen, here, advantage)
        return carry, jnp.where(chosen, here, 0.0)

    rewards, values = jax.lax.stop_gradient((rewards, values))
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    ends = last_of(segment_ids, mask)
    tokens = [jnp.moveaxis(array, -1, 0) for array in (rewards, values, mask, ends)]
    nothing = jnp.zeros_like(tokens[0][0] + tokens[1][0])
    advantages = jax.lax.scan(step, (nothing, nothing), tokens, reverse=True)[1]
    advantages = jnp.moveaxis(advantages, 0, -1)
    return advantages, advantages + values


def discounted_returns(
    rewards: PerToken, mask: Mask, *, gamma: float = 1.0, segment_ids: Segments | None = None
) -> PerToken:
    """Σ_{k≥t} γ^{k−t} r_k over the policy's own tokens: REINFORCE's reward to go."""
    nothing = jnp.zeros_like(rewards)
    return gae(rewards, nothing, mask, gamma=gamma, lam=1.0, segment_ids=segment_ids)[0]


def last_of(segment_ids: Segments | None, mask: Mask) -> Mask:
    """Which tokens end their sequence."""
    last = jnp.zeros(mask.shape, bool).at[..., -1].set(True)
    if segment_ids is None:
        return last
    return last.at[..., :-1].set(segment_ids[..., 1:] != segment_ids[..., :-1])


def whiten(
    values: PerToken,
    mask: Mask,
    *,
    ddof: int = 0,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> PerToken:
    """(v − mean) / √(var + epsilon) over the mask, which must be the whole rollout batch's.

    `shift_mean=False` adds the mean back: PPO whitens rewards so, advantages not. `ddof` is 0 in
    OpenAI's code and its replicas, 1 in verl. Equal values become zeros (their mean, unshifted).
    """
    values = jax.lax.stop_gradient(values)
    count = jnp.sum(mask)
    largest = jnp.max(values, where=mask, initial=jnp.finfo(values.dtype).min)
    deviations = jnp.where(mask, values - largest, 0.0)
    mean = jnp.sum(deviations) / jnp.maximum(count, 1)
    centred = jnp.where(mask, deviations - mean, 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - ddof, 1)
    white = centred * jax.lax.rsqrt(variance + epsilon)
    return white if shift_mean else jnp.where(mask, white + mean + largest, 0.0)


def token_rewards(
    rewards: Shaped[Array, "*B"], kl: PerToken, mask: Mask, *, kl_coef: float
) -> PerToken:
    """−kl_coef · kl_t, plus a completion's reward at its last token (arXiv 1909.08593, eq. 2).

    `kl` is `kl_k1(old_logps, ref_logps)`. One sequence a row. `rewards` stay as scored.
    """
    last = mask & (jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1] == 1)
    scores = jnp.where(last, jnp.expand_dims(rewards, -1), 0.0)
    return jax.lax.stop_gradient(jnp.where(mask, scores - kl_coef * kl, 0.0))


def per_token(advantages: groups.PerGroup, mask: Mask) -> PerToken:
    """Each completion's advantage at each of its tokens: [P, G] → [P·G, T], prompt-major."""
    return jnp.where(mask, advantages.reshape(-1, 1), 0.0)


def reinforce_plus_plus(
    rewards: PerToken, mask: Mask, *, gamma: float = 1.0, ddof: int = 0
) -> PerToken:
    """Returns of `token_rewards`, whitened over the batch: REINFORCE++ (arXiv 2501.03262)."""
    return whiten(discounted_returns(rewards, mask, gamma=gamma), mask, ddof=ddof)


def reinforce_plus_plus_baseline(
    rewards: groups.Rewards,
    mask: Mask,
    counted: groups.Counted | None = None,
    *,
    ddof: int = 0,
) -> PerToken:
    """`group_centered`, then whitened over the batch's tokens: REINFORCE++ for several samples."""
    deviations, there = groups.from_largest(rewards, counted)
    mask = mask & there.reshape(-1, 1)
    return whiten(per_token(groups.centered(deviations, there), mask), mask, ddof=ddof)


def process_advantages(
    rewards: Float[Array, "P G T"],
    ends: Bool[Array, "P G T"],
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Float[Array, "P G T"]:
    """GRPO with rewards of steps (arXiv 2402.03300, §4.1.3): normalised, then summed from t on.

    `rewards` stand where a step `ends`; all steps of a group are normalised together.
    """
    P, G, T = rewards.shape
    flat = groups.group_normalized(
        rewards.reshape(P, G * T), ends.reshape(P, G * T), ddof=ddof, epsilon=epsilon
    )
    return jnp.cumsum(flat.reshape(P, G, T)[..., ::-1], axis=-1)[..., ::-1]
