"""Losses against numbers worked out by hand, and what all of them have in common."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import loss_weights, losses


def positional(function) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


# Hyper-parameters without a default.
HYPER = {
    "pmd": {"tau": 0.5},
    "mirror_descent": {"tau": 0.5},
    "pmd_token": {"tau": 0.5, "log_low": -1.5, "log_high": 0.3},
}
LOSSES = {
    name: functools.partial(getattr(losses, name), **HYPER.get(name, {})) for name in losses.__all__
}
PAIRED = {name for name in LOSSES if positional(LOSSES[name])[0].startswith("chosen_")}
# In how many arguments a loss is differentiable, if not in one.
DIFFERENTIABLE = {name: 2 for name in PAIRED} | {
    **{"soft_bradley_terry": 2, "ordered_logit": 4, "xpo": 3},
}
# Per sequence, and not zero at zero: a value of ½, a win rate of 0 and equal rewards are wrong.
NOT_ZERO = {
    *{"value_bce", "self_play_preference", "kto", "bco", "soft_bradley_terry", "ordered_logit"},
    *PAIRED,
}
# Their gradient is meant not to be their value's slope.
STRAIGHT_THROUGH = {"dft", "cispo", "vespo", "gspo_token", "kl_k3_plus", "nash_md"}
LISTWISE = {"plackett_luce", "aot_unpaired"}  # a term depends on more than its own row

# Logits of three positions over three words; the tokens read and predicted are 0 → 1 → 2 → 1... of
# which the last two were written by the assistant.
LOGITS = jnp.array([[[0.5, -0.2, 0.1], [1.0, 0.0, 2.0], [0.0, 1.5, -0.5]]])
TARGETS = jnp.array([[1, 2, 1]])
COMPLETION = jnp.array([[False, True, True]])
LOGPS = jnp.take_along_axis(jax.nn.log_softmax(LOGITS), TARGETS[..., None], axis=-1)[..., 0]
ZERO_OUTSIDE = jnp.where(COMPLETION, LOGPS, 0.0)


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


@pytest.mark.parametrize("name", sorted(set(LOSSES) - NOT_ZERO))
def test_losses_and_their_gradients_are_zero_where_the_arrays_are(name):
    zeros = [jnp.zeros((2, 3))] * len(positional(LOSSES[name]))
    np.testing.assert_array_equal(LOSSES[name](*zeros), np.zeros((2, 3)))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_values_and_gradients_are_finite_at_any_finite_input(name):
    """Also where a weight is 0: 0 · inf would be NaN."""
    wild = {True: [0.0, -1e-30, -0.7, -30.0, -1e5, -1e30], False: [-3.0, 0.0, 0.5, 2.0]}
    choices = [wild[word.endswith(("logps", "ratios"))] for word in positional(LOSSES[name])]
    arguments = [jnp.asarray(column) for column in zip(*itertools.product(*choices), strict=True)]
    weights = jnp.arange(len(arguments[0])) % 2
    argnums = tuple(range(DIFFERENTIABLE.get(name, 1)))
    gradients = jax.grad(lambda *given: jnp.sum(weights * LOSSES[name](*given)), argnums)
    assert np.all(np.isfinite(LOSSES[name](*arguments)))
    assert np.all(np.isfinite(gradients(*arguments)))


@pytest.mark.parametrize("name", sorted(set(LOSSES) - STRAIGHT_THROUGH - LISTWISE))
def test_gradients_are_slopes(name):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(1), len(positional(LOSSES[name])))
        given = [jax.random.normal(key, (40,), "float64") for key in keys]
        for n in range(DIFFERENTIABLE.get(name, 1)):
            gradient = jax.grad(lambda *x: jnp.sum(LOSSES[name](*x)), n)(*given)
            ahead, behind = (
                LOSSES[name](*given[:n], given[n] + step, *given[n + 1 :]) for step in (1e-6, -1e-6)
            )
            np.testing.assert_allclose(gradient, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_only_the_first_arguments_are_differentiable(name):
    loss = LOSSES[name]
    names = positional(loss)
    count = DIFFERENTIABLE.get(name, 1)
    arguments = [
        jax.random.normal(key, (2, 3)) for key in jax.random.split(jax.random.key(0), len(names))
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
