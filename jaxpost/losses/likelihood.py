"""Likelihood losses, per token: zero where `logps` is zero, so they take no mask."""

import jax
import jax.numpy as jnp

from jaxpost.typing import PerToken


def nll(logps: PerToken) -> PerToken:
    """Negative log-likelihood of the targets: −log π(y_t | y_<t), nats a token, minimised."""
    return -logps


def dft(logps: PerToken) -> PerToken:
    """Dynamic fine-tuning (arXiv 2508.05629, eq. 9): −sg(π(y_t)) · log π(y_t).

    Its gradient is the likelihood's times the token's own probability, which is held constant:
    tokens that the model finds implausible pull less.
    """
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps


def z_loss(log_normalizers: PerToken) -> PerToken:
    """Squared log-normalizer (PaLM, arXiv 2204.02311, §5): (log Σ_v exp logit_v)².

    Keeps logits from drifting; a usual coefficient is 1e-4.
    """
    return jnp.square(log_normalizers)
