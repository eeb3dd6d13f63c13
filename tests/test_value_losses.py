"""Value losses against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import losses


def close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=0)


def test_clipped_values():
    old, returns = jnp.array([0.2, 0.4, 0.6]), jnp.array([0.985625, 1.0375, 1.05])
    loss = losses.value_clip(jnp.array([0.5, 0.3, 0.9]), old, returns)
    close(jnp.mean(loss), 0.158227)
    close(0.172774 + 0.1 * jnp.mean(loss), 0.188597)
    one = jnp.ones(1)
    close(losses.value_clip(0.9 * one, 0.5 * one, 1.5 * one), 0.32)


def test_a_value_that_went_too_far_has_no_gradient():
    def slope(value, old, ret):
        one = jnp.ones(1)
        return jax.grad(lambda v: losses.value_clip(v, old * one, ret * one)[0])(value * one)[0]

    assert slope(0.9, 0.5, 1.5) == 0  # towards the return, beyond the clip
    close(slope(0.6, 0.5, 1.5), -0.9)
    close(slope(0.1, 0.5, 1.5), -1.4)  # away from it: pulled back


def test_squared_values():
    """Two completions with a return of 1 and 0, as predicted before the update."""
    values, returns = jnp.array([0.2, 0.4, 0.6, 0.3, 0.1]), jnp.array([1.0, 1, 1, 0, 0])
    close(jnp.mean(losses.value_squared(values, returns)), 0.126)


def test_a_critic_of_the_prompt():
    logits, rewards = jnp.array([0, 1.386294, -1.386294]), jnp.array([1.0, 0, 1])
    loss = losses.value_bce(logits, rewards)
    close(loss, [0.693147, 1.609438, 1.609438])
    close(jnp.mean(loss), 1.304007)
    gradient = jax.grad(lambda z: jnp.sum(losses.value_bce(z, rewards)))(logits)
    close(gradient, [-0.5, 0.8, -0.8])
    close(rewards - jax.nn.sigmoid(logits), [0.5, -0.8, 0.8])


def test_a_confident_critic_is_finite():
    logits, rewards = jnp.array([1e30, -1e30, 1e4]), jnp.array([1.0, 0, 0])
    close(losses.value_bce(logits, rewards), [0, 0, 1e4])
