"""Policy-gradient losses: minimised, differentiable in `logps` alone, zero where advantages are.

ρ = exp(logps − old_logps), of log-ratios clamped to ±20 (no gradient beyond). Arrays are per token;
those marked so are per sequence, with `logps` summed over the completion. A method is a loss, an
advantage (`advantages`) and weights (`loss_weights`):

    PPO           ppo_clip    gae, whiten                    token_mean
    GRPO          ppo_clip    group_normalized               sequence_mean        + β kl_k3
    Dr.GRPO       ppo_clip    group_centered                 fixed_length
    DAPO          ppo_clip    group_normalized               token_mean           clip_high 0.28
    GSPO          gspo        group_normalized               mean over sequences
    CISPO         cispo       group_normalized               token_mean
    RLOO          reinforce   leave_one_out                  sequence_sum_mean
    REINFORCE++   ppo_clip    reinforce_plus_plus            token_mean
    ReMax         reinforce   greedy_baseline                sequence_sum_mean
    OPO           reinforce   optimal_baseline               sequence_sum_mean
    MaxRL         reinforce   mean_normalized                sequence_sum_mean
    GPG           reinforce   contrast_scaled                token_mean
    SPPO          ppo_clip    reward − σ(value logit)        token_mean           value_bce
    ORZ           ppo_clip    gae (γ = λ = 1), whiten        token_mean           value_squared
    AReaL         ppo_decoupled, the same advantages         token_mean
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import Array, PerSequence, PerToken, Shaped


def reinforce(logps: PerToken, advantages: PerToken) -> PerToken:
    """−A log π (Williams 1992): the plain policy gradient, per token or sequence."""
    return -jax.lax.stop_gradient(advantages) * logps


def ppo_clip(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PerToken:
    """−min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, eq. 7).

    DAPO (arXiv 2503.14476, eq. 8) raises `clip_high` to 0.28. At ρ = 1 its gradient is REINFORCE's.
    Given log-probabilities of whole sequences it clips the sequence's ratio, as TRL's RLOO does.
    """
    return clipped(ratios.ratio(logps, old_logps), advantages, clip_low, clip_high)


def clipped(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """The pessimistic surrogate, for any kind of ratio."""
    advantages = jax.lax.stop_gradient(advantages)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * advantages, bounded * advantages)


def ppo_dual_clip(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> PerToken:
    """`ppo_clip`, at most −dual_clip · A where A < 0 (arXiv 1912.09729; dual_clip > 1).

    So a token that the sampler hardly ever chose, and that was bad, cannot dominate an update.
    """
    loss = ppo_clip(logps, old_logps, advantages, clip_low=clip_low, clip_high=clip_high)
    advantages = jax.lax.stop_gradient(advantages)
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def ppo_decoupled(
    logps: PerToken,
    old_logps: PerToken,
    sampler_logps: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PerToken:
    """w · ppo_clip, w = π_old / π_sampler constant (AReaL, arXiv 2505.24298): stale data.

    `old_logps` are the policy's just before the update, recomputed as the batch arrives; the
    sampler's may come from several versions within a sequence. w has no cap here: to cap it or to
    mask, multiply the loss weights by `truncated_importance` or `banded_importance` and take
    `ppo_clip` instead. Never do both.
    """
    weights = jax.lax.stop_gradient(ratios.ratio(old_logps, sampler_logps))
    return weights * ppo_clip(logps, old_logps, advantages, clip_low=clip_low, clip_high=clip_high)


def gspo(
    logps: PerSequence,
    old_logps: PerSequence,
    advantages: PerSequence,
    lengths: Shaped[Array, "*B"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PerSequence:
    """Per sequence: `ppo_clip` of s = (π/π_old)^(1/length) (GSPO, arXiv 2507.18071, eqs. 5, 7).

    `logps` are sums over a completion of `lengths` tokens. A sequence without tokens has s = 1.
    """
    lengths = jnp.maximum(jax.lax.stop_gradient(lengths), 1)
    s = ratios.exponential(ratios.log_ratio(logps, old_logps) / lengths)
    return clipped(s, advantages, clip_low, clip_high)


def gspo_token(
    logps: PerToken,
    sequence_log_ratios: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PerToken:
    """`ppo_clip` of sg[s] · π / sg[π], per token (GSPO-token, arXiv 2507.18071, eqs. 13–14).

    `sequence_log_ratios`: log s, the mean of logps − old_logps over the sequence, at each of its
    tokens (`loss_weights.sequence_means`, which knows packed rows). With one advantage a sequence
    and `sequence_mean` weights its value and gradient are `gspo`'s.
    """
    constant = jax.lax.stop_gradient((sequence_log_ratios, logps))
    s = ratios.exponential(constant[0] + (logps - constant[1]))
    return clipped(s, advantages, clip_low, clip_high)


def cispo(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> PerToken:
    """−sg[clip(ρ, 1 − clip_low, 1 + clip_high)] A log π (MiniMax-M1, arXiv 2506.13585, eqs. 4–5).

    Every token keeps a gradient; only its weight is bounded. The paper has no lower bound (1.0 is
    none) and does not print its upper one. TRL's cap is absolute: its 5.0 is `clip_high=4.0`.
    """
    weights = jnp.clip(ratios.ratio(logps, old_logps), 1 - clip_low, 1 + clip_high)
    return reinforce(logps, weights * advantages)


def sapo(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PerToken:
    """−(4/τ) σ(τ (ρ − 1)) A (SAPO, arXiv 2511.20347): a soft gate in the place of the clip.

    τ is `tau_positive` where A > 0, `tau_negative` elsewhere. At ρ = 1 the gradient is REINFORCE's.
    """
    advantages = jax.lax.stop_gradient(advantages)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratios.ratio(logps, old_logps) - 1))
    return -gate * advantages


def vespo(
    logps: PerSequence,
    old_logps: PerSequence,
    advantages: PerSequence,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> PerSequence:
    """Per sequence: −sg[w^k exp(λ (1 − w))] A log π, w = π/π_old (VESPO, arXiv 2602.10693).

    k and λ are the power and decay of the advantage's sign (TRL's defaults). `logps` are sums.
    """
    positive = jax.lax.stop_gradient(advantages) > 0
    power = jnp.where(positive, power_positive, power_negative)
    decay = jnp.where(positive, decay_positive, decay_negative)
    w = ratios.ratio(logps, old_logps)
    kernel = jnp.exp(power * jnp.log(w) + decay * (1 - w))
    return reinforce(logps, kernel * advantages)


def entropy_bonus(entropies: PerToken) -> PerToken:
    """−H(π(· | y_<t)), nats: adding coefficient · this to a loss rewards entropy."""
    return -entropies
