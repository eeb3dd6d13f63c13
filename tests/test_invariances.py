"""What fine-tuning may not depend on: padding, packing, row order, microbatches, devices, jit.

The objective and the batch are those of the SFT recipe, with its z-loss, on two architectures that
have between them all that could leak: grouped queries, windows, two ropes, soft-caps, norms of
queries and keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import batch as batches
from jaxpost import train_step
from jaxpost.data import sources
from jaxpost.models import Rope, TransformerConfig, logits, make_model
from jaxpost.recipes import setup, sft

V = 37
LLAMA = TransformerConfig(
    vocab_size=V, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=24,
    query_scale=0.5, tied_embeddings=True,
)  # fmt: skip
WINDOWED = TransformerConfig(
    vocab_size=V, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=24,
    query_scale=0.4, activation="gelu_tanh", norm_offset=1.0, qk_norm=True, sandwich_norms=True,
    attn_softcap=5.0, final_softcap=8.0, embed_scale=4.0, rope_local=Rope(theta=100.0),
    window=4, local_layers=(True, False),
)  # fmt: skip
RECIPE = sft.Config(
    run="", model=setup.ModelConfig(path=""), data=sources.DataConfig(train="none"), z_loss=0.01
)
CONFIGS = {"llama": LLAMA, "windowed": WINDOWED}
LENGTHS = (9, 4, 12, 2, 7, 5, 11, 3)
# Most of the time here is compilation, and nothing here runs long enough to repay it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def model_of(name: str):
    """The model and parameters drawn by NumPy, large enough for every part to matter."""
    model = make_model(CONFIGS[name])
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.3, jnp.float32)  # noqa: E731
    return model, jax.tree.map(draw, shapes)


def examples() -> list[batches.Example]:
    rng = np.random.default_rng(5)
    found = []
    for length in LENGTHS:
        mask = np.arange(length) >= rng.integers(1, length)
        weights = np.where(mask, rng.uniform(0.5, 1.0, size=length), 0).astype(np.float32)
        found.append(batches.Example(rng.integers(0, V, length, np.int32), mask, weights))
    return found


def token_rows(groups, width: int) -> batches.TokenBatch:
    """A batch with the examples of each group in a row."""
    pairs = [batches.shift(example) for example in examples()]
    return batches.stack([batches.row_of([pairs[i] for i in g], width) for g in groups])


def weighted(batch: batches.TokenBatch) -> sft.SFTBatch:
    """With weights that are fixed over all of it."""
    return sft.make_batch(batch, jax.random.key(0))


def rows(groups, width: int) -> sft.SFTBatch:
    return weighted(token_rows(groups, width))


ALONE = [[i] for i in range(len(LENGTHS))]
PACKED = batches.best_fit_decreasing([n - 1 for n in LENGTHS], 16)


def objective_of(name: str):
    return sft.make_objective(RECIPE, model_of(name)[0])


@functools.cache
def compiled(name: str):
    return quick_jit(jax.value_and_grad(objective_of(name), has_aux=True))


def evaluate(name: str, batch):
    """((loss, metrics), gradients)"""
    return compiled(name)(model_of(name)[1], batch)


@functools.cache
def reference(name: str):
    return evaluate(name, rows(ALONE, 16))


def assert_same(found, expected) -> None:
    for ours, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=sorted(CONFIGS))
def name(request) -> str:
    return request.param


def test_the_gradient_is_not_trivial(name):
    (loss, _), gradients = reference(name)
    assert np.isfinite(loss)
    for leaf in jax.tree.leaves(gradients):
        assert np.max(np.abs(leaf)) > 1e-4


def test_what_padding_holds(name):
    batch = token_rows(ALONE, 16)
    rng = np.random.default_rng(6)
    padding = batch.segment_ids == 0
    noise = rng.integers(0, V, size=(3, *padding.shape))
    spoilt = batch._replace(
        inputs=np.where(padding, noise[0], batch.inputs).astype(np.int32),
        targets=np.where(padding, noise[1], batch.targets).astype(np.int32),
        positions=np.where(padding, noise[2], batch.positions).astype(np.int32),
    )
    assert_same(evaluate(name, weighted(spoilt)), reference(name))


def test_how_long_padding_is(name):
    """Longer rows, and a row of nothing else."""
    empty = batches.empty_row(24)
    alone = token_rows(ALONE, 24)
    more = jax.tree.map(lambda x, row: np.concatenate([x, row[None]]), alone, empty)
    assert_same(evaluate(name, weighted(more)), reference(name))


def test_order_of_rows(name):
    assert_same(evaluate(name, rows(ALONE[::-1], 16)), reference(name))


def filled(groups):
    """With empty rows, up to as many rows as there are examples: a shape already compiled for."""
    return [*groups, *[[]] * (len(ALONE) - len(groups))]


def test_packing(name):
    assert len(PACKED) < 5
    assert_same(evaluate(name, rows(filled(PACKED), 16)), reference(name))
    turned = [group[::-1] for group in PACKED]
    assert_same(evaluate(name, rows(filled(turned), 16)), reference(name))


def test_packed_logits_are_those_of_each_sequence_alone(name):
    model, params = model_of(name)
    packed, alone = rows(filled(PACKED), 16), rows(ALONE, 16)
    forward = quick_jit(functools.partial(logits, model))
    together = forward(params, packed.inputs, packed.segment_ids)
    apart = forward(params, alone.inputs, alone.segment_ids)
    for row, group in enumerate(PACKED):
        start = 0
        for example in group:
            length = LENGTHS[example] - 1
            np.testing.assert_allclose(
                together[row, start : start + length], apart[example, :length], atol=1e-5
            )
            start += length


def moved(name: str, params, batch, microbatches: int):
    """Metrics of an update, and how far plain gradient descent moves the parameters in it."""
    optimizer = optax.sgd(1.0)
    step = train_step.make_train_step(objective_of(name), optimizer, microbatches=microbatches)
    state, metrics = quick_jit(step)(train_step.init_state(params, optimizer), batch)
    return metrics, jax.tree.map(lambda before, after: before - after, params, state.params)


@pytest.mark.parametrize(
    ("name", "microbatches"), [("llama", 2), ("llama", 4), ("llama", 8), ("windowed", 4)]
)
def test_microbatches(name, microbatches):
    batch = rows([*PACKED, *PACKED, [0], [3]], 16)  # rows of very different counts
    (loss, metrics), gradients = evaluate(name, batch)
    sums, change = moved(name, model_of(name)[1], batch, microbatches)
    assert_same(change, gradients)
    assert_same([sums["loss"], sums["correct"]], [loss, metrics["correct"]])


def test_devices(name):
    """Sixteen rows on eight devices, in two microbatches, as on one."""
    if len(jax.devices()) < 8:
        pytest.skip("fewer than 8 devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(rows(ALONE * 2, 16), jax.NamedSharding(mesh, jax.P("data")))
    params = jax.device_put(model_of(name)[1], jax.NamedSharding(mesh, jax.P()))
    sums, change = moved(name, params, batch, 2)
    assert len(sums["loss"].sharding.device_set) == 8
    (loss, metrics), gradients = reference(name)
    assert_same(change, gradients)
    assert_same([sums["loss"], sums["correct"]], [loss, 2 * metrics["correct"]])


def test_jit():
    objective, params = objective_of("llama"), model_of("llama")[1]
    plain = jax.value_and_grad(objective, has_aux=True)(params, rows(ALONE, 16))
    assert_same(plain, reference("llama"))


def test_nothing_to_train_on_is_zero_and_not_nan(name):
    batch = token_rows(ALONE, 16)
    nothing = batch._replace(
        completion_mask=np.zeros_like(batch.completion_mask),
        loss_weights=np.zeros_like(batch.loss_weights),
    )
    (loss, metrics), gradients = evaluate(name, weighted(nothing))
    assert loss == metrics["correct"] == 0
    for leaf in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(leaf, 0.0)
