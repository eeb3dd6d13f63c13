"""The shift, packing and rows: small enough to write out."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpost import batch as batches
from jaxpost.batch import Example


def example(tokens, mask, weights=None) -> Example:
    mask = np.array(mask, bool)
    weights = mask if weights is None else weights
    return Example(np.array(tokens, np.int32), mask, np.array(weights, np.float32))


def test_the_shift_keeps_the_first_token_of_the_completion():
    # Two tokens of prompt and three of completion are three targets, the first one included.
    pairs = batches.shift(example([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], [0, 0, 0.5, 1, 2]))
    np.testing.assert_array_equal(pairs.inputs, [1, 2, 3, 4])
    np.testing.assert_array_equal(pairs.targets, [2, 3, 4, 5])
    np.testing.assert_array_equal(pairs.mask, [False, True, True, True])
    np.testing.assert_array_equal(pairs.weights, [0, 0.5, 1, 2])


def test_a_mask_on_the_first_token_asks_for_nothing():
    # Nothing predicts it.
    pairs = batches.shift(example([1, 2], [1, 0]))
    assert not pairs.mask.any()
    assert len(batches.shift(example([7], [1])).targets) == 0


def test_a_batch_of_sequences_is_that_of_the_sequences_alone():
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 0]])
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 0]], bool)
    weights = np.array([[9, 9, 0.5, 2], [9, 1, 3, 9]])
    found = batches.token_batch(tokens, mask, weights)
    alone = [
        batches.row_of([batches.shift(example(*parts))], 3)
        for parts in zip(tokens, mask, weights, strict=True)
    ]
    for ours, right in zip(found, batches.stack(alone), strict=True):
        np.testing.assert_array_equal(ours, right)
        assert ours.dtype == right.dtype
    equal = batches.token_batch(tokens.tolist(), mask.tolist()).loss_weights
    np.testing.assert_array_equal(equal, [[0, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match=r"tokens \(2, 4\), mask \(2, 3\)"):
        batches.token_batch(tokens, mask[:, 1:])


def test_a_packed_row_written_out():
    first, second = example([1, 2, 3], [0, 1, 1]), example([4, 5, 6, 7], [0, 0, 1, 1], [9, 9, 2, 3])
    row = batches.row_of([batches.shift(first), batches.shift(second)], 7)
    np.testing.assert_array_equal(row.inputs, [1, 2, 4, 5, 6, 0, 0])
    np.testing.assert_array_equal(row.targets, [2, 3, 5, 6, 7, 0, 0])  # 3 → 4 is nobody's target
    np.testing.assert_array_equal(row.completion_mask, np.array([1, 1, 0, 1, 1, 0, 0], bool))
    np.testing.assert_array_equal(row.loss_weights, [1, 1, 0, 2, 3, 0, 0])
    np.testing.assert_array_equal(row.segment_ids, [1, 1, 2, 2, 2, 0, 0])
    np.testing.assert_array_equal(row.positions, [0, 1, 0, 1, 2, 0, 0])


def test_packing_keeps_completion_masks():
    # Masks [0, 1] and [0, 1] (as targets) come to [0, 1, 0, 1].
    pair = batches.shift(example([1, 2, 3], [0, 0, 1]))
    row = batches.row_of([pair, pair], 4)
    np.testing.assert_array_equal(row.completion_mask, np.array([0, 1, 0, 1], bool))


def test_positions_restart_and_no_label_crosses_a_boundary():
    short, long = (
        batches.shift(example([1, 2, 3], [1] * 3)),
        batches.shift(example([4] * 4, [1] * 4)),
    )
    row = batches.row_of([short, long], 5)
    np.testing.assert_array_equal(row.positions, [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(row.targets, [2, 3, 4, 4, 4])
    np.testing.assert_array_equal(row.inputs, [1, 2, 4, 4, 4])


def test_a_row_that_does_not_fit():
    pair = batches.shift(example([1, 2, 3], [1, 1, 1]))
    with pytest.raises(ValueError, match="4 tokens do not fit in a row of 3"):
        batches.row_of([pair, pair], 3)


def test_rows_are_stacked_field_by_field():
    row = batches.row_of([batches.shift(example([1, 2, 3], [0, 1, 1]))], 4)
    batch = batches.stack([row, batches.empty_row(4)])
    assert all(field.shape == (2, 4) for field in batch)
    assert [field.dtype for field in batch] == [
        np.int32, np.int32, np.bool_, np.float32, np.int32, np.int32,
    ]  # fmt: skip
    np.testing.assert_array_equal(batch.inputs, [[1, 2, 0, 0], [0, 0, 0, 0]])
    assert not batch.completion_mask[1].any()


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [
        # Longest first: 5 cut to 4 fills a bin, 4 another, 2 opens a third, 1 joins it.
        ([4, 2, 4, 1], 4, [[0], [2], [1, 3]]),
        ([5, 3, 3, 5], 8, [[0, 1], [3, 2]]),
        ([6, 4, 3, 2], 8, [[0, 3], [1, 2]]),  # 2 goes to the fuller bin
        ([2, 2, 2, 2], 4, [[0, 1], [2, 3]]),
        ([3, 0, 3], 3, [[0, 1], [2]]),
        ([], 4, []),
    ],
)
def test_best_fit_decreasing_by_hand(lengths, capacity, bins):
    assert batches.best_fit_decreasing(lengths, capacity) == bins


def test_what_is_longer_than_a_bin():
    with pytest.raises(ValueError, match="item 1 has length 9, over the capacity of 8"):
        batches.best_fit_decreasing([3, 9], 8)


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same rule, looking at every bin for every item."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [capacity - sum(lengths[i] for i in items) for items in bins]
        fits = [number for number, left in enumerate(room) if left >= lengths[item]]
        if fits:
            bins[min(fits, key=lambda number: (room[number], number))].append(item)
        else:
            bins.append([item])
    return bins


@hypothesis.settings(deadline=None, max_examples=200, derandomize=True)
@hypothesis.given(st.data(), st.integers(1, 40))
def test_best_fit_decreasing_of_any_lengths(data, capacity):
    lengths = data.draw(st.lists(st.integers(0, capacity), max_size=60))
    bins = batches.best_fit_decreasing(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    filled = [sum(lengths[item] for item in items) for items in bins]
    assert all(total <= capacity for total in filled)
    # No two bins could have been one.
    assert all(a + b > capacity for i, a in enumerate(filled) for b in filled[:i] if a and b)
    assert bins == plain_best_fit(lengths, capacity)
