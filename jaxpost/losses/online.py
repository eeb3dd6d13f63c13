"""Losses of preferences that are judged while training, on the policy's own samples."""

from jaxpost import ratios
from jaxpost.losses import policy, preference
from jaxpost.typing import Array, Float, PerSequence, PerToken


def nash_md(
    logps: PerToken, ref_logps: PerToken, win_rates: Float[Array, "*#B #T"], *, beta: float = 0.1
) -> PerToken:
    """−(P − ½ − β log π/π_ref) log π, the bracket constant (Nash-MD, arXiv 2312.00886; TRL's form).

    P: the probability that the policy's completion beats one of the opponent, whose logits are a
    mixture of the policy's and the reference's. A tie, ½, leaves the KL term. Summed over tokens.
    """
    return policy.reinforce(logps, win_rates - 0.5 - beta * ratios.log_ratio(logps, ref_logps))


def xpo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    reference_sample_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    alpha: float = 1e-5,
) -> PerSequence:
    """`dpo` + α log π(ỹ), ỹ a sample of the reference (XPO, arXiv 2405.21046): optimism.

    One of the pair is sampled by the policy, one, ỹ, by the reference; log π(ỹ) is the policy's.
    """
    arguments = chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    return preference.dpo(*arguments, beta=beta) + alpha * reference_sample_logps
