"""Shared prompts and packed rows change the work, not the states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import attention, compact, models, train_step
from jaxpost import batch as batches
from jaxpost.models.model import TransformerConfig

SMALL = TransformerConfig(
    vocab_size=61,
    width=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_width=40,
    max_positions=512,
    query_scale=6**-0.5,
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8, 8])
LENGTHS = (5, 1, 3, 2, 9, 1, 4, 4)  # of two completions a prompt


def rows(width: int = 20):
    """One completion a row after its prompt: (what is read, the mask of targets)."""
    draw, sequences = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        prompt = PROMPTS[number // 2]
        chosen = np.repeat([False, True], [len(prompt), length])
        tokens = np.concatenate([prompt, draw.integers(0, 61, length)]).astype(np.int32)
        sequences.append(batches.shift(batches.Example(tokens, chosen, chosen.astype(np.float32))))
    batch = batches.stack([batches.row_of([sequence], width) for sequence in sequences])
    read = compact.Plain(batch.inputs, batch.segment_ids, batch.positions)
    return read, batch.completion_mask


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_states_and_gradients_are_those_of_rows_of_their_own(parts, window):
    local = (True, False) if window else ()
    config = dataclasses.replace(SMALL, window=window, local_layers=local)
    model = models.make_model(config)
    params = model.init(jax.random.key(0))
    read, mask = rows()
    wanted = jnp.asarray(np.random.default_rng(1).normal(size=(*mask.shape, 24)), jnp.float32)
    wanted = jnp.where(mask[..., None], wanted, 0.0)

    @jax.jit
    def alone(params):
        states = compact.hidden(model, params, read)
        return jnp.sum(wanted * states), states

    order, layout = compact.lay_out(read, mask, parts, width=24)
    divided = train_step.split((wanted[order], train_step.Divided(layout)), parts)

    @jax.jit
    def together(params):
        def part(shared):
            wanted, layout = shared
            states = compact.hidden(model, params, layout)
            return jnp.sum(wanted * states), states

        sums, states = jax.lax.map(part, divided)
        return jnp.sum(sums), jnp.moveaxis(states, 0, 1).reshape(len(order), *states.shape[2:])

    (plain, states), gradient = jax.value_and_grad(alone, has_aux=True)(params)
    (value, shared), shared_gradient = jax.value_and_grad(together, has_aux=True)(params)
    np.testing.assert_allclose(shared[np.argsort(order)][mask], states[mask], atol=2e-5)
    np.testing.assert_allclose(value, plain, atol=1e-4)
    for a, b in zip(jax.tree.leaves(shared_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_prompt_is_read_once():
    """Inputs end one token before the sequence; prompts end where the first target is chosen."""
    read, mask = rows()
    _, layout = compact.lay_out(read, mask, 1, width=24)
    per_prompt = [
        len(prompt) - 1 + sum(LENGTHS[2 * number : 2 * number + 2])
        for number, prompt in enumerate(PROMPTS)
    ]
    assert np.count_nonzero(layout.segment_ids) == sum(per_prompt)
    assert layout.inputs.shape == (1, 1, 48)


def test_each_part_holds_neighbours_and_indexes_its_own_tokens():
    read, mask = rows()
    order, layout = compact.lay_out(read, mask, 4, width=24)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]  # row i, i + 4 are a prompt's
    flat = layout.inputs.reshape(4, -1)
    for part in range(4):
        for place, row in enumerate(order[part::4]):
            used = np.flatnonzero(mask[row])
            found = flat[part][layout.places[part, place, used]]
            assert found.tolist() == read.inputs[row, used].tolist()


def test_long_completions_of_a_short_prompt_stay_apart():
    assert compact.worth_sharing(64, [64] * 8, width=576)
    assert not compact.worth_sharing(8, [2000] * 8, width=64)
    assert not compact.worth_sharing(100, [5], width=576)  # nothing to share with
    assert not compact.worth_sharing(0, [5] * 8, width=576)


def test_long_rows_are_cut_into_rows_of_like_length():
    """40 sequences of 100 tokens that begin differently: 2 a row of 256."""
    draw = np.random.default_rng(0)
    inputs = draw.integers(0, 61, (40, 100)).astype(np.int32)
    ones = np.ones_like(inputs)
    read = compact.Plain(inputs, ones, np.cumsum(ones, axis=1) - 1)
    _, layout = compact.lay_out(read, np.ones(inputs.shape, bool), 2, width=24)
    assert layout.inputs.shape == (2, 10, 256)


def test_branches_see_their_trunk_and_themselves():
    branch = attention.BRANCH
    segments = jnp.array([[1, 1, 1 + branch, 1 + branch, 1 + 2 * branch, 2, 2 + branch, 0]])
    positions = jnp.array([[0, 1, 2, 3, 2, 0, 1, 0]])
    seeing = attention.Seeing(segments, positions, None)
    seen = attention.visible_keys(seeing, 0, 8)[0].astype(int).tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    near = attention.visible_keys(seeing._replace(window=jnp.asarray(2)), 4, 5)[0, 0]
    assert near.astype(int).tolist() == [0, 1, 0, 0, 1]  # by position: 0 is two away


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (7, 7), (8, 8), (9, 10), (13, 14), (17, 20), (33, 40)]
)
def test_counts_are_rounded_up_to_few(count, expected):
    assert compact.rounded(count) == expected
