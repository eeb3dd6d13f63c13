"""Token log-probabilities: against a plain softmax over all logits, and within their memory."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import batch as batches
from jaxpost import logps, losses, sampling
from jaxpost.logps import loss as fused
from jaxpost.logps import tiles
from jaxpost.models import TransformerConfig, make_model

# Most of the time here is compilation, and nothing here runs long enough to repay it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
WIDTH = 8
RNG = np.random.default_rng(0)
# Each row asks for another part of its targets; one row asks for none.
MASK = np.zeros((4, 7), bool)
MASK[0, 3:6] = MASK[1] = True
MASK[2, [0, 2, 6]] = True


def settings(
    temperature=1.0, top_k=None, top_p=None, min_p=None, softcap=None, chunk=8, entropies=False
):
    return logps.Settings(temperature, top_k, top_p, min_p, softcap, chunk, entropies)


def problem(vocabulary: int, scale: float = 1.0):
    hidden = RNG.normal(size=(4, 7, WIDTH)).astype(np.float32) * scale
    head = RNG.normal(size=(vocabulary, WIDTH)).astype(np.float32)
    targets = RNG.integers(0, vocabulary, size=(4, 7))
    targets[1, :2] = 0, vocabulary - 1
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)


def plain(hidden, head, targets, mask, given):
    """The same scores from all logits at once."""
    raw = hidden @ head.T
    if given.softcap is not None:
        raw = given.softcap * jnp.tanh(raw / given.softcap)
    if given[:4] != (1.0, None, None, None):
        raw = sampling.truncate(
            raw,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
        )
    normalizers = jax.nn.logsumexp(raw, axis=-1)
    chosen = jnp.take_along_axis(raw, targets[..., None], axis=-1)[..., 0]
    correct = chosen >= jnp.max(raw, axis=-1)
    entropies = jnp.zeros_like(normalizers)
    if given.entropies:
        log_p = jnp.where(raw > -jnp.inf, raw, -1e9) - normalizers[..., None]
        entropies = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    scores = logps.TokenScores(chosen - normalizers, normalizers, correct, entropies)
    return jax.tree.map(lambda x: jnp.where(mask, x, 0).astype(jnp.float32), scores)


@functools.partial(quick_jit, static_argnums=(0, 5))
def scores_and_gradients(score, hidden, head, targets, mask, given):
    """The gradients are of a sum that mixes all fields with different signs and sizes."""
    coefficients = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 7)), jnp.float32)

    def total(hidden, head):
        scores = score(hidden, head, targets, mask, given)
        mixed = coefficients[0] * scores.logps + coefficients[1] * scores.log_normalizers
        return jnp.sum(mixed + coefficients[2] * scores.entropies), scores

    gradients, scores = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
    return scores, gradients


@pytest.mark.parametrize(
    ("tile", "vocabulary", "given"),
    [
        (16, 16, settings(chunk=1)),
        (8, 16, settings(chunk=1000)),
        (5, 37, settings()),  # seven whole tiles and a rest of two
        (16, 37, settings(softcap=3.0, chunk=12)),
        (1000, 37, settings(softcap=3.0)),
        (16, 37, settings(temperature=0.7, softcap=3.0)),
        (5, 37, settings(temperature=0.7, softcap=3.0, entropies=True)),
        (1000, 16, settings(entropies=True)),
        (5, 37, settings(top_k=9, top_p=0.95, entropies=True)),
        (5, 37, settings(temperature=0.7, top_k=9, top_p=0.95, min_p=0.01, softcap=3.0)),
    ],
)
def test_scores_and_gradients_equal_a_plain_softmax(monkeypatch, tile, vocabulary, given):
    monkeypatch.setattr(tiles, "CPU_TILE", tile)
    hidden, head, targets = problem(vocabulary)
    if given.top_k is not None:  # a target that is truncated away has no gradient to compare
        targets = jnp.argmax(hidden @ head.T, axis=-1)
    arguments = (hidden, head, targets, jnp.asarray(MASK), given)
    expected, wanted = scores_and_gradients(plain, *arguments)
    ours, found = scores_and_gradients(logps.score_hidden, *arguments)
    np.testing.assert_allclose(ours.logps, expected.logps, atol=1e-5)
    np.testing.assert_allclose(ours.log_normalizers, expected.log_normalizers, atol=1e-5)
    np.testing.assert_array_equal(ours.correct, expected.correct)
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5)


def one_loss(scores, weights):
    loss = losses.dft(scores.logps) + 0.1 * losses.z_loss(scores.log_normalizers)
    return weights * (loss + 0.3 * losses.entropy_bonus(scores.entropies))


@functools.partial(quick_jit, static_argnums=(0, 6))
def loss_and_gradients(loss, hidden, head, targets, mask, weights, given):
    """Of three times the loss: the factor must reach the gradients."""

    def total(hidden, head):
        value, scores = loss(hidden, head, targets, mask, given, one_loss, weights)
        return 3 * value, (value, scores)

    gradients, values = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
    return values, gradients


def plain_loss(hidden, head, targets, mask, given, per_token, *data):
    scores = plain(hidden, head, targets, mask, given)
    return jnp.sum(jnp.where(mask, per_token(scores, *data), 0.0)), scores


@pytest.mark.parametrize(
    ("tile", "chunk", "vocabulary", "given"),
    [
        (16, 1, 16, settings(chunk=8)),
        (8, 8, 16, settings(chunk=1000)),  # whole tiles
        (5, 8, 37, settings(chunk=1000)),  # seven whole tiles and a rest of two
        (16, 12, 37, settings(softcap=3.0, chunk=1000)),
        (16, 12, 37, settings(temperature=0.6, chunk=1000, entropies=True)),
        (1000, 1000, 37, settings(softcap=3.0, chunk=4)),  # as on accelerators
    ],
)
def test_a_loss_and_its_gradients_formed_together(monkeypatch, tile, chunk, vocabulary, given):
    monkeypatch.setattr(tiles, "CPU_TILE", tile)
    monkeypatch.setattr(fused, "CPU_CHUNK", chunk)
    hidden, head, targets = problem(vocabulary)
    weights = jnp.asarray(RNG.normal(size=(4, 7)), jnp.float32)
    for mask in (jnp.asarray(MASK), jnp.ones((4, 7), bool), jnp.zeros((4, 7), bool)):
        arguments = (hidden, head, targets, mask, weights, given)
        (expected, scores), wanted = loss_and_gradients(plain_loss, *arguments)
        (loss, ours), found = loss_and_gradients(logps.loss_of_hidden, *arguments)
        alone, _ = logps.loss_of_hidden(hidden, head, targets, mask, given, one_loss, weights)
        np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-5)
        for mine, right in zip((*ours, *found), (*scores, *wanted), strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-5, rtol=2e-6)


def test_what_is_not_asked_for_is_zero_and_has_no_gradient():
    hidden, head, targets = problem(11, scale=50.0)
    for mask in (jnp.asarray(MASK), jnp.zeros((4, 7), bool)):
        scores, (of_hidden, of_head) = scores_and_gradients(
            logps.score_hidden, hidden, head, targets, mask, settings()
        )
        for field in scores:
            np.testing.assert_array_equal(np.asarray(field)[~np.asarray(mask)], 0.0)
        np.testing.assert_array_equal(np.asarray(of_hidden)[~np.asarray(mask)], 0.0)
        assert np.all(np.isfinite(of_head))
        assert np.any(of_head != 0) == bool(np.any(mask))


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262)]
)
def test_log_probabilities_are_those_of_the_temperature_sampled_at(temperature, expected):
    scores = logps.score_hidden(
        jnp.ones((1, 1, 1)),
        jnp.array([[2.0], [0.0]]),
        jnp.zeros((1, 1), int),
        jnp.ones((1, 1), bool),
        settings(temperature=temperature),
    )
    np.testing.assert_allclose(scores.logps, [[expected]], atol=1e-6)


def test_a_target_outside_the_distribution_has_no_probability():
    scores = logps.score_hidden(
        jnp.ones((1, 3, 1)),
        jnp.log(jnp.array([[0.5], [0.3], [0.2]])),
        jnp.array([[0, 1, 2]]),
        jnp.ones((1, 3), bool),
        settings(top_k=2),
    )
    np.testing.assert_allclose(scores.logps, [[np.log(0.625), np.log(0.375), -np.inf]], atol=1e-6)


def test_a_tie_for_the_highest_is_correct():
    scores = logps.score_hidden(
        jnp.ones((1, 3, 1)),
        jnp.array([[1.0], [1.0], [0.0]]),
        jnp.array([[0, 1, 2]]),
        jnp.ones((1, 3), bool),
        settings(),
    )
    np.testing.assert_array_equal(scores.correct, [[1, 1, 0]])


def tiny_model():
    config = TransformerConfig(
        vocab_size=13, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=8,
        query_scale=0.5, final_softcap=4.0, init_std=0.5,
    )  # fmt: skip
    model = make_model(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(2)
    return model, jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)


def test_a_models_scores_equal_its_logits():
    model, params = tiny_model()
    tokens = np.arange(2, 9, dtype=np.int32)
    mask = np.arange(7) >= 2
    example = batches.Example(tokens, mask, mask.astype(np.float32))
    batch = batches.stack([batches.row_of([batches.shift(example)], 9)])
    scores = logps.token_scores(model, params, batch, chunk=4)
    hidden = model.apply(params, batch.inputs, batch.segment_ids, batch.positions)
    full = jax.nn.log_softmax(model.unembed(params, hidden))
    expected = np.take_along_axis(np.asarray(full), batch.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        scores.logps, np.where(batch.completion_mask, expected, 0), atol=1e-5
    )
    np.testing.assert_array_equal(logps.token_logps(model, params, batch, chunk=4), scores.logps)
    # Any object with those fields will do.
    alike = types.SimpleNamespace(**batch._asdict())
    np.testing.assert_array_equal(logps.token_logps(model, params, alike, chunk=4), scores.logps)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("differentiate", [False, True])
def test_what_a_loss_needs_of_the_batch_comes_through_data(rows, differentiate):
    """An array [B, T] in a closure would meet chunks that are packed; it is refused, both ways."""
    hidden, head, targets = (x[:rows] if len(x) == 4 else x for x in problem(11))
    mask, weights = jnp.asarray(MASK[:rows]), jnp.ones((rows, 7))

    def loss(per_token, *data):
        def of(hidden):
            return logps.loss_of_hidden(hidden, head, targets, mask, settings(), per_token, *data)

        return jax.grad(lambda h: of(h)[0])(hidden) if differentiate else of(hidden)[0]

    for wrong in (
        lambda s: weights * losses.nll(s.logps),
        lambda s: jnp.sum(losses.nll(s.logps)),
        lambda s: losses.nll(s.logps)[:, None],
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            loss(wrong)
        assert "goes through *data" in error.value.__notes__[0]
    with pytest.raises(ValueError, match=rf"data 0 has the shape \({rows},\)"):
        loss(lambda s, w: w * losses.nll(s.logps), weights[:, 0])
    loss(lambda s, w: w * losses.nll(s.logps), weights)


def temporary_bytes(function, *shapes) -> int:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


V, B, T, D = 128_000, 2, 1024, 4
SHAPES = (
    ((B, T, D), jnp.float32),
    ((V, D), jnp.float32),
    ((B, T), jnp.int32),
    ((B, T), jnp.bool),
)


def forward_bytes(chunk: int, **distribution) -> int:
    given = settings(chunk=chunk, **distribution)
    return temporary_bytes(lambda *arguments: logps.score_hidden(*arguments, given).logps, *SHAPES)


def backward_bytes(chunk: int, **distribution) -> int:
    given = settings(chunk=chunk, **distribution)

    def loss(hidden, head, targets, mask):
        return jnp.sum(logps.score_hidden(hidden, head, targets, mask, given).logps)

    return temporary_bytes(jax.grad(loss, argnums=(0, 1)), *SHAPES)


def fused_bytes(chunk: int) -> int:
    given = settings(chunk=chunk)

    def loss(hidden, head, targets, mask):
        scored = logps.loss_of_hidden(hidden, head, targets, mask, given, lambda s: -s.logps)
        return scored[0]

    return temporary_bytes(jax.grad(loss, argnums=(0, 1)), *SHAPES)


def test_the_fused_loss_keeps_the_logits_of_one_chunk():
    kept = {chunk: chunk * V * 4 for chunk in (64, 256)}
    head = V * D * 4
    for chunk, logits in kept.items():
        measured = fused_bytes(chunk)
        print(f"chunk {chunk}: {measured / 1e6:.1f} MB, its logits {logits / 1e6:.1f} MB")
        assert logits < measured < 1.1 * logits + 2 * head
    assert fused_bytes(2048) == fused_bytes(256)  # a CPU keeps no more


@pytest.mark.parametrize("measure", [forward_bytes, backward_bytes])
def test_memory_grows_with_the_chunk_and_not_with_the_batch(measure):
    whole = B * T * V * 4
    head = V * D * 4
    tiled = {chunk: measure(chunk) for chunk in (64, 512)}
    small, large = (
        functools.partial(measure, top_k=5)(chunk) for chunk in (64, 512)
    )  # the whole vocabulary at once
    print(
        f"{measure.__name__}: {tiled[64] / 1e6:.1f} and {tiled[512] / 1e6:.1f} MB for chunks of 64 "
        f"and 512, truncated {small / 1e6:.1f} and {large / 1e6:.1f} MB; "
        f"all logits {whole / 1e6:.0f} MB"
    )
    assert tiled[64] < tiled[512] < whole / 50
    assert tiled[512] < 4 * 512 * tiles.CPU_TILE * 4 + head
    # Truncation looks at the whole vocabulary at once: a few arrays of [chunk, V].
    assert 4 * small < large < 6 * 512 * V * 4
