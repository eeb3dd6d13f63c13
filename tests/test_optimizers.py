"""Optimizers against hand computations, schedules at their corners, and what is decayed or not."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import optimizers
from jaxpost.optimizers import OptimizerConfig

NAMES = ("adamw", "lion", "adafactor", "muon", "sgd")


def constant(name="adamw", rate=0.1, **changes):
    """An optimizer with a constant rate and, unless asked for, no clipping."""
    changes = {"max_grad_norm": None, **changes}
    config = OptimizerConfig(name=name, learning_rate=rate, schedule="constant", **changes)
    return optimizers.make_optimizer(config, 100)[0]


def tiny_params(dtype=jnp.float32):
    """The names and axes of a transformer's parameters: 3 layers, width 4, rank 2."""
    shapes = {
        "embedding": (7, 4),
        "final_norm": {"scale": (4,)},
        "layers": {
            "attn_norm": {"scale": (3, 4)},
            "q_proj": {"kernel": (3, 4, 6), "bias": (3, 6)},
            "o_proj": {"kernel": (3, 6, 4), "lora_a": (3, 6, 2), "lora_b": (3, 2, 4)},
        },
        "lm_head": (7, 4),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    random = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(random.normal(size=s), dtype) for s in leaves])


def frozen_but_lora(params):
    """As a train step gives the trainable part: None in the place of what is frozen."""
    return jax.tree.map_with_path(
        lambda path, p: p if path[-1].key.startswith("lora") else None, params
    )


def step(optimizer, params, gradients, state=None):
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


# ---- each optimizer lowers a loss, in float32 state, whatever tree arrives


@pytest.mark.parametrize(
    ("tree", "dtype"), [(lambda p: p, jnp.bfloat16), (frozen_but_lora, jnp.float32)]
)
@pytest.mark.parametrize("name", NAMES)
def test_lowers_a_quadratic(name, tree, dtype):
    params = tree(tiny_params(dtype))
    optimizer = constant(name, 0.05, max_grad_norm=10.0, weight_decay=0.01)

    def loss(params):
        leaves = jax.tree.leaves(params)
        return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32) - 0.3)) for leaf in leaves)

    def update(carry, _):
        return step(optimizer, carry[0], jax.grad(loss)(carry[0]), carry[1]), None

    carry = (params, optimizer.init(params))
    (after, state), _ = jax.jit(lambda carry: jax.lax.scan(update, carry, length=40))(carry)
    assert loss(after) < 0.5 * loss(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(dtype)}
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert kinds <= {"float32", "int32"}


# ---- steps computed by hand

KERNEL = {"layers": {"q_proj": {"kernel": jnp.full((1, 1, 2), 2.0)}}}


def kernel_of(tree):
    return np.asarray(tree["layers"]["q_proj"]["kernel"]).reshape(2)


def gradient_of(values):
    return jax.tree.map(lambda k: jnp.reshape(jnp.asarray(values), k.shape), KERNEL)


def test_two_steps_of_adamw_by_hand():
    """θ ← θ − η (m̂ / (√v̂ + ε) + λ θ)."""
    optimizer = constant("adamw", 0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5)
    params, state = step(optimizer, KERNEL, gradient_of([3.0, -0.5]))
    first = [2 - 0.1 * (3 / (3 + 1e-3) + 1.0), 2 - 0.1 * (-0.5 / (0.5 + 1e-3) + 1.0)]
    np.testing.assert_allclose(kernel_of(params), first, rtol=1e-6)

    params, _ = step(optimizer, params, gradient_of([1.0, 0.5]), state)
    m = (0.8 * 0.2 * 3 + 0.2 * 1) / (1 - 0.8**2), (0.8 * 0.2 * -0.5 + 0.2 * 0.5) / (1 - 0.8**2)
    v = (0.9 * 0.1 * 9 + 0.1 * 1) / (1 - 0.9**2), (0.9 * 0.1 * 0.25 + 0.1 * 0.25) / (1 - 0.9**2)
    second = [
        was - 0.1 * (m_i / (math.sqrt(v_i) + 1e-3) + 0.5 * was)
        for was, m_i, v_i in zip(first, m, v, strict=True)
    ]
    np.testing.assert_allclose(kernel_of(params), second, rtol=1e-6)


def test_a_step_of_lion_by_hand():
    """The sign of b1 m + (1 − b1) g, then m ← b2 m + (1 − b2) g."""
    optimizer = constant("lion", 0.1, weight_decay=0.5)
    params, state = step(optimizer, KERNEL, gradient_of([3.0, -0.5]))
    np.testing.assert_allclose(kernel_of(params), [2 - 0.1 * (1 + 1), 2 - 0.1 * (-1 + 1)])
    # m = 0.01 g = [.03, -.005]; against it g = [-.2, .04]: signs of [.027 − .02, −.0045 + .004]
    params, _ = step(optimizer, params, gradient_of([-0.2, 0.04]), state)
    np.testing.assert_allclose(kernel_of(params), [1.8 - 0.1 * 1.9, 2.0 - 0.1 * (-1 + 1)])


def test_decay_of_sgd_stays_out_of_its_momentum():
    """m ← b1 m + g and θ ← θ − η (m + λ θ): two steps with g = 0 only shrink."""
    optimizer = constant("sgd", 0.1, weight_decay=0.5)
    params, state = step(optimizer, KERNEL, gradient_of([0.0, 1.0]))
    np.testing.assert_allclose(kernel_of(params), [2 * 0.95, 2 * 0.95 - 0.1], rtol=1e-6)
    params, _ = step(optimizer, params, gradient_of([0.0, 0.0]), state)
    expected = [2 * 0.95**2, (2 * 0.95 - 0.1) * 0.95 - 0.1 * 0.9]
    np.testing.assert_allclose(kernel_of(params), expected, rtol=1e-6)


def test_first_step_of_adafactor_by_hand():
    """V̂ = rows · columns / total of g², update g/√V̂; where g² has rank 1 that is g's sign."""
    rows, columns = jnp.linspace(1, 2, 128), jnp.linspace(-3, 3, 128)
    gradient = {"layers": {"q_proj": {"kernel": (rows[:, None] * columns)[None]}}}
    optimizer = constant("adafactor", 0.1)
    params, _ = step(optimizer, jax.tree.map(jnp.ones_like, gradient), gradient)
    expected = 1 - 0.1 * jnp.sign(gradient["layers"]["q_proj"]["kernel"])
    np.testing.assert_allclose(params["layers"]["q_proj"]["kernel"], expected, rtol=1e-4)


# ---- stacks of layers are not matrices


def test_muon_orthogonalises_each_layer_of_its_own():
    """Updates have all singular values near 0.2 √max(in, out), layers apart however different."""
    params = {"layers": {"q_proj": {"kernel": jnp.zeros((3, 8, 16))}}}
    gradients = jax.random.normal(jax.random.key(0), (3, 8, 16)) * jnp.array(
        [1e-3, 1, 1e3]
    ).reshape(3, 1, 1)
    moved, _ = step(constant("muon", 1.0), params, {"layers": {"q_proj": {"kernel": gradients}}})
    update = -moved["layers"]["q_proj"]["kernel"] / (0.2 * math.sqrt(16))
    values = jnp.linalg.svd(update, compute_uv=False)
    assert values.min() > 0.5
    assert values.max() < 1.5
    # The directions are those of the gradient: U Vᵀ of its singular value decomposition.
    u, _, vt = jnp.linalg.svd(gradients, full_matrices=False)
    alignment = jnp.sum(update * (u @ vt), axis=(1, 2)) / 8
    assert alignment.min() > 0.7


def test_muon_leaves_embeddings_norms_and_biases_to_adamw():
    params = tiny_params()
    gradients = tiny_params()
    by_muon, _ = step(constant("muon", weight_decay=0.1), params, gradients)
    by_adamw, _ = step(constant("adamw", weight_decay=0.1), params, gradients)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(by_muon), jax.tree.leaves(by_adamw), strict=True
    ):
        same = np.allclose(a, b, rtol=1e-6)
        assert same == (path[-1].key not in ("kernel", "lora_a", "lora_b")), path


@pytest.mark.parametrize("layers", [2, 200])
def test_adafactor_factors_the_axes_of_matrices_only(layers):
    """Rows and columns of each layer's matrix, even where there are more layers than rows."""
    params = {
        "layers": {
            "q_proj": {"kernel": jnp.zeros((layers, 128, 160)), "bias": jnp.zeros((layers, 160))}
        }
    }
    state = jax.eval_shape(constant("adafactor").init, params)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes[-3:] == [layers * 128, layers * 160, layers * 160]  # rows, columns, the bias


def test_adafactor_treats_each_layer_as_if_it_were_alone():
    gradients = jax.random.normal(jax.random.key(0), (3, 128, 130)) * jnp.array(
        [1e-3, 1, 1e3]
    ).reshape(3, 1, 1)

    def moved(gradients):
        tree = {"layers": {"q_proj": {"kernel": gradients}}}
        params, _ = step(constant("adafactor"), jax.tree.map(jnp.zeros_like, tree), tree)
        return params["layers"]["q_proj"]["kernel"]

    together = moved(gradients)
    for layer in range(3):
        alone = moved(gradients[layer : layer + 1])[0]
        np.testing.assert_allclose(together[layer], alone, rtol=1e-4, atol=1e-7)


# ---- weight decay


@pytest.mark.parametrize("tree", [lambda p: p, frozen_but_lora])
@pytest.mark.parametrize("name", NAMES)
def test_matrices_shrink_and_norms_and_biases_do_not(name, tree):
    """With no gradient, a step multiplies what is decayed by 1 − rate · decay."""
    params = tree(tiny_params())
    optimizer = constant(name, 0.1, weight_decay=0.5)
    after, _ = step(optimizer, params, jax.tree.map(jnp.zeros_like, params))
    for (path, was), now in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(after), strict=True
    ):
        decayed = path[-1].key not in ("scale", "bias")
        np.testing.assert_allclose(now, was * (0.95 if decayed else 1.0), rtol=1e-6, err_msg=path)


# ---- clipping


@pytest.mark.parametrize(("highest", "scale"), [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0)])
def test_gradients_are_clipped_to_their_global_norm(highest, scale):
    params = {"a": {"bias": jnp.zeros(1)}, "b": {"bias": jnp.zeros(1)}}
    gradients = {"a": {"bias": jnp.array([3.0])}, "b": {"bias": jnp.array([-4.0])}}
    after, _ = step(constant("sgd", 1.0, max_grad_norm=highest), params, gradients)
    assert after["a"]["bias"] == pytest.approx(-3 * scale)
    assert after["b"]["bias"] == pytest.approx(4 * scale)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    """A sum of 40 000 ones would stop at 256 in bfloat16; their norm is 200."""
    params = {"a": {"bias": jnp.zeros(40_000, jnp.bfloat16)}}
    gradients = jax.tree.map(jnp.ones_like, params)
    after, _ = step(constant("sgd", 1.0, max_grad_norm=100.0), params, gradients)
    np.testing.assert_array_equal(after["a"]["bias"].astype(jnp.float32), -0.5)


# ---- precision


def test_bfloat16_parameters_follow_a_float32_copy():
    """Steps of 1e-3 are lost on a bfloat16 one at 1.0 (the next numbers are 1/128 away)."""
    params = {"layers": {"o_proj": {"kernel": jnp.ones((1, 1, 1), jnp.bfloat16)}}}
    gradients = jax.tree.map(jnp.ones_like, params)
    optimizer = constant("sgd", 1e-3, b1=0.0)
    state, apart = optimizer.init(params), params
    for _ in range(100):
        params, state = step(optimizer, params, gradients, state)
        apart = jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), apart, gradients)
    assert apart["layers"]["o_proj"]["kernel"].item() == 1.0
    assert params["layers"]["o_proj"]["kernel"].item() == pytest.approx(0.9, abs=1 / 256)
    assert state.master["layers"]["o_proj"]["kernel"].item() == pytest.approx(0.9, abs=1e-5)


def test_second_moments_of_bfloat16_gradients_are_followed():
    """v ← 0.999 v + 0.001 g² reaches g² although 0.001 of it is under a bfloat16's last bit."""
    params = {"layers": {"o_proj": {"kernel": jnp.ones((1, 1, 1), jnp.bfloat16)}}}
    optimizer = constant("adamw")
    state = optimizer.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)

    def update(state, _):
        return optimizer.update(gradients, state, params)[1], None

    state, _ = jax.lax.scan(update, state, length=3000)
    moments = [leaf for leaf in jax.tree.leaves(state.inner) if leaf.shape == (1, 1, 1)]
    assert max(m.item() for m in moments) == pytest.approx(1.0, rel=1e-4)
    assert min(m.item() for m in moments) == pytest.approx(1 - 0.999**3000, rel=1e-4)


def test_an_optimizer_started_anew_keeps_what_bfloat16_cannot_hold():
    """100 steps of 1e-3, each after a restart, still lead from 1 to 0.9; the momentum is gone."""
    params = {"layers": {"o_proj": {"kernel": jnp.ones((1, 1, 1), jnp.bfloat16)}}}
    gradients = jax.tree.map(jnp.ones_like, params)
    optimizer = constant("sgd", 1e-3, b1=0.9)
    state = optimizer.init(params)
    for _ in range(100):
        state = optimizers.restarted(optimizer, state, params)
        params, state = step(optimizer, params, gradients, state)
    assert params["layers"]["o_proj"]["kernel"].item() == pytest.approx(0.9, abs=1 / 256)


def test_an_optimizer_started_anew_follows_its_schedule_on():
    config = OptimizerConfig("sgd", 1.0, "linear", b1=0.9, max_grad_norm=None)
    optimizer, schedule = optimizers.make_optimizer(config, 4)
    params, gradients = {"a": {"bias": jnp.zeros(())}}, {"a": {"bias": jnp.ones(())}}
    state = optimizer.init(params)
    for count in range(4):
        state = optimizers.restarted(optimizer, state, params)
        updates, state = optimizer.update(gradients, state, params)
        assert -float(updates["a"]["bias"]) == float(schedule(count))


# Numbers of float32 state a parameter, of a stack of square matrices that is large enough.
STATE = {"adamw": 2, "lion": 1, "adafactor": 0, "muon": 1, "sgd": 1}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_states(name):
    shape = (2, 256, 256)
    for dtype, copies in ((jnp.float32, 0), (jnp.bfloat16, 1)):
        params = {"layers": {"o_proj": {"kernel": jax.ShapeDtypeStruct(shape, dtype)}}}
        state = jax.eval_shape(constant(name).init, params)
        size = sum(leaf.size for leaf in jax.tree.leaves(state)) / math.prod(shape)
        assert size == pytest.approx(STATE[name] + copies, abs=0.01)


# ---- schedules


def rates(schedule, steps=100, at=(0,), **changes):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, **changes)
    make = optimizers.make_optimizer(config, steps)[1]
    return [float(make(step)) for step in at]


@pytest.mark.parametrize(
    ("schedule", "changes", "at", "expected"),
    [
        ("constant", {}, (0, 50, 99), [1, 1, 1]),
        ("constant", {"warmup": 10}, (0, 5, 10, 99), [0, 0.5, 1, 1]),
        ("linear", {}, (0, 25, 100), [1, 0.75, 0]),
        ("linear", {"warmup": 20, "end_fraction": 0.2}, (0, 20, 60, 100), [0, 1, 0.6, 0.2]),
        ("cosine", {}, (0, 50, 100), [1, 0.5, 0]),
        ("cosine", {"warmup": 20, "end_fraction": 0.2}, (0, 20, 60, 100), [0, 1, 0.6, 0.2]),
        ("cosine", {"warmup": 20}, (40,), [(1 + math.cos(math.pi / 4)) / 2]),
        ("wsd", {"warmup": 10}, (0, 10, 80, 90, 100), [0, 1, 1, 0.5, 0]),
        ("wsd", {"decay_fraction": 0.5, "end_fraction": 0.5}, (50, 75, 100), [1, 0.75, 0.5]),
        ("wsd", {"warmup": 90, "decay_fraction": 0.5}, (90, 95, 100), [1, 0.5, 0]),
        ("inverse_sqrt", {"warmup": 25}, (0, 25, 100), [0, 1, 0.5]),
    ],
)
def test_rates(schedule, changes, at, expected):
    np.testing.assert_allclose(rates(schedule, at=at, **changes), expected, atol=1e-6)


def test_an_update_takes_the_rate_of_its_step():
    config = OptimizerConfig("sgd", 1.0, "linear", warmup=2, b1=0.0, max_grad_norm=None)
    optimizer, schedule = optimizers.make_optimizer(config, 4)
    params, gradients = {"a": {"bias": jnp.zeros(())}}, {"a": {"bias": jnp.ones(())}}
    state, seen = optimizer.init(params), []
    for _ in range(4):
        updates, state = optimizer.update(gradients, state, params)
        seen.append(-float(updates["a"]["bias"]))
    assert seen == [float(schedule(i)) for i in range(4)] == [0.0, 0.5, 1.0, 0.5]


# ---- settings that cannot be meant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgd", "b2": 0.9}, "optimizer.b2 is a key of adamw, lion, muon; remove it"),
        ({"name": "adafactor", "b1": 0.9}, "optimizer.b1 is a key of adamw, lion, muon, sgd"),
        ({"name": "lion", "eps": 1e-8}, "optimizer.eps is a key of adamw, muon"),
        ({"schedule": "constant", "end_fraction": 0.1}, "end_fraction is not for"),
        ({"schedule": "linear", "decay_fraction": 0.1}, "decay_fraction is for"),
        ({"schedule": "inverse_sqrt"}, "needs optimizer.warmup"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"end_fraction": 1.5}, "end_fraction is 1.5; it must be at least 0 and at most 1"),
        ({"schedule": "wsd", "decay_fraction": -0.1}, "decay_fraction is -0.1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; it must be above 0"),
        ({"b1": 1.0}, "b1 is 1.0; it must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps is 0.0"),
    ],
)
def test_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**changes)


def test_a_warmup_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup is 100 of 100 updates"):
        rates("linear", warmup=100)


def test_every_key_is_explained():
    for field in dataclasses.fields(OptimizerConfig):
        assert field.metadata["help"], field.name
