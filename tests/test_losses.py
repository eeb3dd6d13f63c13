"""Losses against numbers worked out by hand, and what all of them have in common."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import loss_weights, losses

# Every public loss, and how many of its first arguments are differentiable.
DIFFERENTIABLE = {"nll": 1, "dft": 1, "z_loss": 1}
LOSSES = {name: getattr(losses, name) for name in losses.__all__}

# Logits of three positions over three words; the tokens read and predicted are 0 → 1 → 2 → 1... of
# which the last two were written by the assistant.
LOGITS = jnp.array([[[0.5, -0.2, 0.1], [1.0, 0.0, 2.0], [0.0, 1.5, -0.5]]])
TARGETS = jnp.array([[1, 2, 1]])
COMPLETION = jnp.array([[False, True, True]])
LOGPS = jnp.take_along_axis(jax.nn.log_softmax(LOGITS), TARGETS[..., None], axis=-1)[..., 0]
ZERO_OUTSIDE = jnp.where(COMPLETION, LOGPS, 0.0)


def positional(function) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_nll_of_three_tokens():
    np.testing.assert_allclose(losses.nll(LOGPS), [[1.473300, 0.407606, 0.306356]], atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "logps", "mask", "expected"),
    [
        (losses.nll, LOGPS, jnp.ones((1, 3), bool), 0.729087),
        (losses.nll, ZERO_OUTSIDE, COMPLETION, 0.356981),
        (losses.dft, ZERO_OUTSIDE, COMPLETION, 0.248336),
    ],
)
def test_token_mean_of_three_tokens(loss, logps, mask, expected):
    total = jnp.sum(loss_weights.token_mean(mask) * loss(logps))
    np.testing.assert_allclose(total, expected, atol=1e-6)


def test_dft_holds_the_probability_constant():
    probabilities = jnp.array([0.9, 0.5, 0.01])
    gradient = jax.grad(lambda logps: jnp.sum(losses.dft(logps)))(jnp.log(probabilities))
    np.testing.assert_allclose(gradient, -probabilities, rtol=1e-6)


def test_z_loss_is_the_square_of_the_normalizer():
    normalizers = jax.nn.logsumexp(jnp.array([[1.0, 0.0, 2.0], [0.0, 1.5, -0.5]]), axis=-1)
    np.testing.assert_allclose(normalizers, [2.407606, 1.806356], atol=1e-6)
    np.testing.assert_allclose(losses.z_loss(normalizers), [5.796567, 3.262922], atol=1e-5)


def test_losses_are_zero_where_logps_are():
    for name in LOSSES:
        np.testing.assert_array_equal(LOSSES[name](jnp.zeros((2, 3))), np.zeros((2, 3)))


def test_every_loss_is_listed():
    assert set(LOSSES) == set(DIFFERENTIABLE)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_only_the_first_arguments_are_differentiable(name):
    loss = LOSSES[name]
    names = positional(loss)
    count = DIFFERENTIABLE[name]
    arguments = [
        -jnp.abs(jax.random.normal(key, (2, 3)))
        for key in jax.random.split(jax.random.key(0), len(names))
    ]
    gradients = jax.grad(lambda *given: jnp.sum(loss(*given)), argnums=tuple(range(len(names))))(
        *arguments
    )
    for argument, gradient in zip(names[:count], gradients[:count], strict=True):
        assert np.any(np.asarray(gradient) != 0), f"{name} is not differentiable in {argument}"
    for argument, gradient in zip(names[count:], gradients[count:], strict=True):
        np.testing.assert_array_equal(gradient, 0, f"{name} is differentiable in {argument}")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_keep_shape_and_agree_under_jit_and_vmap(name):
    logps = -jnp.arange(1.0, 13.0).reshape(2, 3, 2)
    arguments = [logps] * len(positional(LOSSES[name]))
    plain = LOSSES[name](*arguments)
    assert plain.shape == logps.shape
    assert plain.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(LOSSES[name])(*arguments), plain, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(LOSSES[name])(*arguments), plain, rtol=1e-6)
