"""Rollouts against the full forward pass, and what they may not depend on: batch, slot, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import batch as batches
from jaxpost import logps, rollout
from jaxpost.models import cache as caches
from jaxpost.models import model as records
from jaxpost.models import transformer
from jaxpost.rollout import engine, settings, shapes, slots, text

V = 61
CONFIG = records.TransformerConfig(
    vocab_size=V,
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_width=24,
    query_scale=0.4,
    window=8,
    local_layers=(True, False, True),
    attn_softcap=20.0,
    qk_norm=True,
    max_positions=400,
    init_std=0.5,
)
MODEL = transformer.make_model(CONFIG)
PARAMS = MODEL.init(jax.random.key(0))
KEY = jax.random.key(7)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, size=n).tolist() for n in (5, 1, 13, 30, 2)]
SHAPES = rollout.Capacity(rows=8, prompts=8, prompt_tokens=60, new_tokens=40)  # compiled once
DISTRIBUTION = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}

compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
)


class Pieces:
    """A tokenizer whose id i stands for some bytes; the last id is EOS."""

    bos_id, adds_bos = 0, True

    def __init__(self, pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.eos_ids = frozenset([len(self.pieces)])

    def encode(self, text):
        return [self.pieces.index(letter.encode()) for letter in text]

    def decode(self, ids):
        return b"".join([*self.pieces, b"</s>"][i] for i in ids).decode(errors="replace")


TALKER = transformer.make_model(
    records.TransformerConfig(
        vocab_size=24, width=24, layers=1, heads=1, kv_heads=1, head_dim=2, mlp_width=2,
        query_scale=1.0, max_positions=64,
    )
)  # fmt: skip


def in_order(*pieces):
    """A model that says these pieces one after another and then EOS, and its tokenizer.

    Its layers add nothing, so each token decides the next.
    """
    params = TALKER.init(jax.random.key(0))
    layers = dict(params["layers"])
    for name in ("o_proj", "down_proj"):
        layers[name] = {"kernel": jnp.zeros_like(layers[name]["kernel"])}
    size, tokens = TALKER.config.vocab_size, jnp.arange(len(pieces))
    head = jnp.zeros((size, size)).at[tokens + 1, tokens].set(9.0)
    params = {**params, "layers": layers, "embedding": jnp.eye(size), "lm_head": head}
    return TALKER, params, Pieces(pieces)


def token_batch(prompts, result, width=96):
    """The trainer's batch of prompts and their completions."""
    rows = []
    for row, prompt in enumerate(prompts):
        tokens = np.array([*prompt, *result.tokens[row][: result.lengths[row]]], np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        example = batches.Example(tokens, mask, mask.astype(np.float32))
        rows.append(batches.row_of([batches.shift(example)], width))
    return jax.tree.map(jnp.asarray, batches.stack(rows))


def trainers_logps(batch, **distribution):
    return jax.jit(functools.partial(logps.token_logps, MODEL, **distribution))(PARAMS, batch)


def test_greedy_is_the_argmax_of_the_full_forward_pass():
    result = rollout.sample(
        MODEL, PARAMS, PROMPTS, KEY, max_new_tokens=20, temperature=0.0, capacity=SHAPES
    )
    batch = token_batch(PROMPTS, result)
    full = jax.jit(functools.partial(transformer.logits, MODEL))(
        PARAMS, batch.inputs, batch.segment_ids
    )
    wanted = jnp.argmax(full, axis=-1)[batch.completion_mask]
    np.testing.assert_array_equal(batch.targets[batch.completion_mask], wanted)
    np.testing.assert_array_equal(result.logps, 0.0)


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7}, DISTRIBUTION])
def test_logps_equal_the_trainers(distribution):
    result = rollout.sample(
        MODEL,
        PARAMS,
        PROMPTS,
        KEY,
        max_new_tokens=40,
        stop_ids=[5],
        capacity=SHAPES,
        **distribution,
    )
    batch = token_batch(PROMPTS, result)
    trainers = trainers_logps(batch, **distribution)
    np.testing.assert_allclose(
        result.logps[result.mask], trainers[batch.completion_mask], atol=1e-4
    )
    assert np.all(result.logps[~result.mask] == 0)


def test_a_completion_does_not_depend_on_its_company():
    def ask(prompts, ids, **shapes):
        return rollout.sample(
            MODEL, PARAMS, prompts, KEY, max_new_tokens=24, sample_ids=ids, stop_ids=[5], **shapes
        )

    together = ask(PROMPTS, range(5), capacity=SHAPES)
    for row, prompt in enumerate(PROMPTS):
        shapes = rollout.Capacity(prompt_tokens=31)
        alone = ask([prompt], [row], capacity=shapes)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.logps[0], together.logps[row], atol=1e-5)
    other = ask([*PROMPTS[::-1], [1] * 150], [4, 3, 2, 1, 0, 99])
    np.testing.assert_array_equal(other.tokens[:5], together.tokens[::-1])
    np.testing.assert_allclose(other.logps[:5], together.logps[::-1], atol=1e-5)
    padded = np.full((5, 40), 17)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    lengths = [len(prompt) for prompt in PROMPTS]
    from_array = ask(padded, range(5), lengths=lengths, capacity=SHAPES)
    np.testing.assert_array_equal(from_array.tokens, together.tokens)


def test_sample_ids_tell_completions_of_one_prompt_apart():
    settings = {"max_new_tokens": 12, "capacity": SHAPES, "stop_ids": [5]}
    group = rollout.sample(MODEL, PARAMS, [PROMPTS[0]] * 6, KEY, **settings)
    assert len({tuple(row) for row in group.tokens.tolist()}) == 6
    again = rollout.sample(MODEL, PARAMS, [PROMPTS[0]] * 2, KEY, sample_ids=[4, 4], **settings)
    np.testing.assert_array_equal(again.tokens, group.tokens[[4, 4]])


def test_a_completion_goes_on_where_it_was_cut():
    settings = {"capacity": SHAPES, "stop_ids": [-1]}
    whole = rollout.sample(MODEL, PARAMS, [PROMPTS[2]], KEY, max_new_tokens=20, **settings)
    longer = [*PROMPTS[2], *whole.tokens[0, :8].tolist()]
    rest = rollout.sample(MODEL, PARAMS, [longer], KEY, max_new_tokens=12, **settings)
    np.testing.assert_array_equal(rest.tokens[0], whole.tokens[0, 8:])


def test_prompts_longer_than_a_chunk():
    prompt = RNG.integers(0, V, size=300).tolist()
    result = rollout.sample(MODEL, PARAMS, [[4], prompt], KEY, max_new_tokens=10)
    batch = token_batch([[4], prompt], result, width=320)
    trainers = trainers_logps(batch)
    np.testing.assert_allclose(
        result.logps[result.mask], trainers[batch.completion_mask], atol=1e-4
    )


def test_more_prompts_than_are_read_at_once():
    prompts = [[n, n + 1] for n in range(40)]
    many = rollout.sample(MODEL, PARAMS, prompts, KEY, max_new_tokens=4, stop_ids=[-1])
    few = rollout.sample(
        MODEL, PARAMS, prompts[33:36], KEY, max_new_tokens=4,
        sample_ids=[33, 34, 35], stop_ids=[-1], capacity=SHAPES,
    )  # fmt: skip
    np.testing.assert_array_equal(many.tokens[33:36], few.tokens)


def same(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_array_equal(one.stop_reasons, other.stop_reasons)


MANY = [PROMPTS[row] for row in (3, 0, 0, 1, 4, 0, 2, 2, 2, 3, 1, 0, 4, 4, 1)]
MANY_IDS = [int(n) for n in np.random.default_rng(5).permutation(40)[: len(MANY)]]
MANY_SETTINGS = {"max_new_tokens": 30, "stop_ids": [5, 9, 17]}


@functools.cache
def all_at_once():
    """Completions of quite different lengths, sampled without a queue."""
    shapes = rollout.Capacity(rows=16, prompts=8, prompt_tokens=60, new_tokens=30)
    result = rollout.sample(
        MODEL, PARAMS, MANY, KEY, sample_ids=MANY_IDS, capacity=shapes, **MANY_SETTINGS
    )
    assert len(set(result.lengths.tolist())) > 6
    return result


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_the_number_of_slots_changes_nothing(width):
    few = rollout.sample(
        MODEL, PARAMS, MANY, KEY, sample_ids=MANY_IDS, slots=width, capacity=SHAPES,
        **MANY_SETTINGS,
    )  # fmt: skip
    same(few, all_at_once())


def test_the_order_of_the_queue_changes_nothing():
    order = np.random.default_rng(1).permutation(len(MANY))
    turned = rollout.sample(
        MODEL, PARAMS, [MANY[row] for row in order], KEY, slots=4, capacity=SHAPES,
        sample_ids=[MANY_IDS[row] for row in order], **MANY_SETTINGS,
    )  # fmt: skip
    same(turned, rollout.Rollout(*(field[order] for field in all_at_once())))


def test_a_prompt_is_read_once_for_its_group():
    reads = []

    class Counted(engine.Engine):
        def read(self, entering):
            prefix = super().read(entering)
            reads.extend(prefix.rows)
            return prefix

    how = settings.Settings(6, stop_ids=(5,))
    queue = [
        engine.Waiting(row, np.array(PROMPTS[row // 4], np.int32), 0, 6, row) for row in range(20)
    ]
    plan = shapes.shapes_for(rollout.Capacity(20, 5, 30, 6), SHAPES, 3, 1, False)
    run = Counted(slots.forward_of(MODEL), PARAMS, KEY, queue, how, plan, None)
    ended = [one.row for batch in run.run() for one in batch]
    assert sorted(ended) == list(range(20))
    assert len(reads) == len(set(reads)) == 5
    assert run.prefixes == []


def test_limits_end_each_completion():
    limits = [0, 30, 7, 1, 12, 3, 30, 9, 2, 4, 30, 5, 6, 8, 10]
    cut = rollout.sample(
        MODEL, PARAMS, MANY, KEY, sample_ids=MANY_IDS, limits=limits, slots=4, capacity=SHAPES,
        **MANY_SETTINGS,
    )  # fmt: skip
    whole = all_at_once()
    np.testing.assert_array_equal(cut.lengths, np.minimum(whole.lengths, limits))
    np.testing.assert_array_equal(cut.tokens, np.where(cut.mask, whole.tokens, 0))


GROUPED = {"max_new_tokens": 20, "stop_ids": [5, 9, 17], "capacity": SHAPES}


@pytest.mark.parametrize("width", [None, 2, 5])
def test_groups_come_as_they_finish(width):
    whole = rollout.sample(
        MODEL, PARAMS, [prompt for prompt in PROMPTS for _ in range(3)], KEY, **GROUPED
    )
    groups = dict(
        rollout.sample_groups(MODEL, PARAMS, PROMPTS, KEY, group_size=3, slots=width, **GROUPED)
    )
    assert sorted(groups) == [0, 1, 2, 3, 4]
    for number, group in groups.items():
        same(group, rollout.Rollout(*(field[3 * number : 3 * number + 3] for field in whole)))


def test_the_first_group_comes_before_the_last_is_begun():
    limits = [2, 2, *[20] * 8]
    pieces = rollout.sample_groups(
        MODEL, PARAMS, PROMPTS, KEY, group_size=2, slots=2, limits=limits,
        max_new_tokens=20, stop_ids=[-1], capacity=SHAPES,
    )  # fmt: skip
    number, group = next(pieces)
    assert (number, group.lengths.tolist()) == (0, [2, 2])
    assert [number for number, _ in pieces] == [1, 2, 3, 4]


@pytest.mark.parametrize("budget", [1, 20, 63, 1000])
def test_what_a_budget_leaves_is_continued_as_if_nothing_had_been(budget):
    settings = {"sample_ids": MANY_IDS, "slots": 4, "capacity": SHAPES, **MANY_SETTINGS}
    result, calls, drawn = None, 0, 0
    while result is None or (result.stop_reasons == rollout.UNFINISHED).any():
        result = rollout.sample(MODEL, PARAMS, MANY, KEY, begun=result, budget=budget, **settings)
        left = (result.stop_reasons == rollout.UNFINISHED).any()
        calls, drawn, before = calls + 1, int(result.lengths.sum()), drawn
        assert not left or budget <= drawn - before < budget + 4
    same(result, all_at_once())
    assert calls >= min(drawn // (budget + 3), 2)


@pytest.mark.parametrize("enough", [1, 4, 100])
def test_sampling_ends_when_enough_groups_are_done_and_goes_on_later(enough):
    """Whatever was done first, the whole is what is sampled at once."""
    settings = {"sample_ids": MANY_IDS, "slots": 4, "capacity": SHAPES, **MANY_SETTINGS}
    begun, calls = rollout.unstarted(len(MANY), 30), 0
    while (begun.stop_reasons == rollout.UNFINISHED).any():
        before = int(np.sum(begun.stop_reasons != rollout.UNFINISHED))
        groups = dict(
            rollout.sample_groups(
                MODEL,
                PARAMS,
                MANY,
                KEY,
                group_size=1,
                begun=begun,
                enough=before + enough,
                **settings,
            )
        )
        assert sorted(groups) == list(range(len(MANY)))
        parts = [groups[row] for row in range(len(MANY))]
        begun = rollout.Rollout(*map(np.concatenate, zip(*parts, strict=True)))
        done = int(np.sum(begun.stop_reasons != rollout.UNFINISHED))
        assert done >= min(before + enough, len(MANY))
        calls += 1
    same(begun, all_at_once())
    assert (calls > 1) == (enough < len(MANY))


def test_a_stop_string_is_found_across_a_continuation():
    model, params, tokenizer = in_order(*SPOKEN)
    settings = {
        "max_new_tokens": 30, "temperature": 0.0, "stop_ids": tokenizer.eos_ids,
        "stop_strings": ["hij"], "tokenizer": tokenizer,
    }  # fmt: skip
    whole = rollout.sample(model, params, [[0]], KEY, **settings)
    for budget in range(1, 8):
        begun = rollout.sample(model, params, [[0]], KEY, budget=budget, **settings)
        same(rollout.sample(model, params, [[0]], KEY, begun=begun, **settings), whole)
    assert whole.lengths.tolist() == [7]


def test_new_prompts_and_continued_ones_together():
    settings = {"slots": 4, "capacity": SHAPES, **MANY_SETTINGS}
    half = rollout.sample(
        MODEL, PARAMS, MANY[:7], KEY, sample_ids=MANY_IDS[:7], budget=30, **settings
    )
    begun = rollout.Rollout(*map(np.concatenate, zip(half, rollout.unstarted(8, 30), strict=True)))
    groups = rollout.sample_groups(
        MODEL, PARAMS, MANY, KEY, group_size=1, sample_ids=MANY_IDS, begun=begun, **settings
    )
    whole = all_at_once()
    found = dict(groups)
    assert len(found) == len(MANY)
    for row, one in found.items():
        same(one, rollout.Rollout(*(field[row : row + 1] for field in whole)))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.08), ("int8", 0.1)])
def test_a_smaller_cache_changes_logps_little(dtype, most):
    prompts = [*PROMPTS, [3] * 70]
    result = rollout.sample(
        MODEL, PARAMS, prompts, KEY, max_new_tokens=40, stop_ids=[-1], slots=3,
        cache_dtype=dtype, capacity=rollout.Capacity(prompt_tokens=70, new_tokens=40),
    )  # fmt: skip
    batch = token_batch(prompts, result, width=128)
    trainers = trainers_logps(batch)
    difference = np.abs(result.logps[result.mask] - trainers[batch.completion_mask])
    assert difference.max() < most
    assert (dtype == "float32") == (difference.max() < 1e-4)


def test_int8_keeps_each_token_and_head_to_its_own_scale():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 8)) * jnp.logspace(-3, 3, 5)[:, None]
    values, scales = caches.quantized(x)
    assert np.abs(values).max(axis=-1).min() == 127
    assert (np.abs(values * scales - x) <= scales * 0.501).all()


@pytest.mark.parametrize("layout", ["whole", "split"])
def test_devices_change_nothing(layout):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def place(leaf):
        divides = layout == "split" and leaf.shape[-1] % 8 == 0
        spec = [None] * (leaf.ndim - 1) + ["data" if divides else None]
        return jax.device_put(
            leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        )

    spread = rollout.sample(
        MODEL, jax.tree.map(place, PARAMS), MANY, KEY, sample_ids=MANY_IDS, slots=8,
        sharding=rows, capacity=SHAPES, **MANY_SETTINGS,
    )  # fmt: skip
    same(spread, all_at_once())


def test_the_stop_id_is_kept_and_nothing_after_it():
    model, params, _ = in_order(*"abcdef")

    def ask(prompts, max_new_tokens):
        result = rollout.sample(
            model, params, prompts, KEY, max_new_tokens=max_new_tokens, temperature=0.0,
            stop_ids=[3, 6], capacity=rollout.Capacity(4, 4, 4, 8),
        )  # fmt: skip
        return result, [rollout.REASONS[reason] for reason in result.stop_reasons]

    result, reasons = ask([[0], [2], [4]], 4)
    np.testing.assert_array_equal(result.tokens, [[1, 2, 3, 0], [3, 0, 0, 0], [5, 6, 0, 0]])
    np.testing.assert_array_equal(result.lengths, [3, 1, 2])
    np.testing.assert_array_equal(result.mask.sum(axis=1), [3, 1, 2])
    assert reasons == ["stop"] * 3
    result, reasons = ask([[0], [1]], 2)
    assert (result.lengths.tolist(), reasons) == ([2, 2], ["length", "stop"])


SPOKEN = ["a", "bc", "d", "e", "fg", "h", "i", "jk", "l", "mn", "op", "qrs", "t", "u", "v", "w"]


@pytest.mark.parametrize(
    ("strings", "length", "said", "reason"),
    [
        (["cd"], 2, "b", "stop_string"),  # spans two tokens
        (["f"], 4, "bcde", "stop_string"),  # inside a token
        (["no", "hij", "gh"], 5, "bcdef", "stop_string"),  # the first to be complete
        (["tu"], 13, "bcdefghijklmnopqrs", "stop_string"),  # in the second block of tokens
        (["w"], 15, "bcdefghijklmnopqrstuv", "stop_string"),  # just before EOS
        (["z", "</s>"], 16, "bcdefghijklmnopqrstuvw", "stop"),  # EOS is no text
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    strings, length, said, reason
):
    model, params, tokenizer = in_order(*SPOKEN)
    result = rollout.sample(
        model, params, [[0], [11]], KEY, max_new_tokens=30, temperature=0.0,
        stop_ids=tokenizer.eos_ids, stop_strings=strings, tokenizer=tokenizer,
    )  # fmt: skip
    np.testing.assert_array_equal(result.tokens[0], [*range(1, length + 1), *[0] * (30 - length)])
    assert result.lengths[0] == length
    assert rollout.REASONS[result.stop_reasons[0]] == reason
    settings = {"max_new_tokens": 30, "stop_strings": strings}
    assert rollout.generate_text(model, params, tokenizer, [[0]], **settings) == [said]
    settings["temperature"] = 0.0
    assert "".join(rollout.stream(model, params, tokenizer, [0], KEY, **settings)) == said


def test_a_stop_string_changes_nothing_before_it():
    tokenizer = Pieces([chr(97 + n % 26) for n in range(V - 1)])
    settings = {"max_new_tokens": 40, "tokenizer": tokenizer, "stop_ids": [-1], "capacity": SHAPES}
    free = rollout.sample(MODEL, PARAMS, PROMPTS, KEY, **settings)
    stopped = rollout.sample(MODEL, PARAMS, PROMPTS, KEY, stop_strings=["e", "st"], **settings)
    assert len(set(stopped.lengths.tolist())) > 1
    np.testing.assert_array_equal(stopped.tokens, np.where(stopped.mask, free.tokens, 0))
    np.testing.assert_allclose(stopped.logps, np.where(stopped.mask, free.logps, 0), atol=1e-5)


def test_streamed_pieces_never_show_half_a_character():
    snow = "☃".encode()
    model, params, tokenizer = in_order(
        "a", "b", snow[:1], snow[1:2], snow[2:], "c", "d", "e", "f", snow[:2], snow[2:], snow[:1]
    )
    pieces = list(
        rollout.stream(model, params, tokenizer, [0], KEY, max_new_tokens=30, temperature=0.0)
    )
    assert "".join(pieces) == "b☃cdef☃\ufffd"
    assert [("\ufffd" in piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 2


def test_settled_text_holds_back_what_may_change():
    assert text.settled("so\nUs", ["\nUser:"]) == "so"
    assert text.settled("so\nUs", ["\nUse", "s"]) == "so"
    assert text.settled("so\nUs\ufffd", []) == "so\nUs"
    assert text.settled("aab", ["aabaac", "xx"]) == ""


def test_text_of_many_prompts_comes_in_their_order():
    tokenizer = Pieces([chr(97 + n % 26) for n in range(V - 1)])
    settings = {"max_new_tokens": 9, "temperature": 0.8}
    texts = rollout.generate_text(MODEL, PARAMS, tokenizer, PROMPTS, KEY, batch_size=2, **settings)
    whole = rollout.sample(
        MODEL, PARAMS, PROMPTS, KEY, stop_ids=tokenizer.eos_ids, capacity=SHAPES, **settings
    )
    for row, found in enumerate(texts):
        ids = whole.tokens[row, : whole.lengths[row]].tolist()
        assert found == tokenizer.decode(ids).removesuffix("</s>")
    assert rollout.generate_text(MODEL, PARAMS, tokenizer, [], max_new_tokens=3) == []


def test_text_prompts_begin_with_bos():
    model, params, tokenizer = in_order(*"abcdef")
    assert text.prompt_ids(tokenizer, "cd") == [0, 2, 3]
    assert rollout.generate_text(model, params, tokenizer, ["d"], max_new_tokens=30) == ["ef"]


def test_nothing_to_sample():
    result = rollout.sample(
        MODEL, PARAMS, PROMPTS[:2], KEY, max_new_tokens=0, stop_ids=[5], capacity=SHAPES
    )
    assert result.tokens.shape == result.logps.shape == result.mask.shape == (2, 0)
    assert result.lengths.tolist() == [0, 0]
    assert [rollout.REASONS[reason] for reason in result.stop_reasons] == ["length"] * 2
    model, params, tokenizer = in_order(*"abc")
    settings = {"max_new_tokens": 0, "temperature": 0.0}
    assert list(rollout.stream(model, params, tokenizer, [1], KEY, **settings)) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        (
            [[1] * 390],
            {},
            "390 tokens and max_new_tokens is 20: 410 positions, over the model's 400",
        ),
        ([[1] * 401], {"max_new_tokens": 0}, "shorten the prompt"),
        ([[1, V]], {}, f"prompt 0 holds token {V}; the vocabulary has {V}"),
        ([], {}, "no prompts"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([[1]], {"top_p": 1.5}, "top_p is 1.5"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"stop_strings": ["a"]}, "tokenizer="),
        ([[1]], {"stop_strings": [""], "tokenizer": Pieces("a")}, "a stop string is empty"),
        ([[1]], {"slots": 0}, "slots is 0"),
        ([[1]], {"limits": [21]}, "limits has 21; each must be from 0 to max_new_tokens"),
        ([[1]], {"begun": rollout.unstarted(2, 20)}, "begun has 2 completions for 1 prompts"),
        ([[1]], {"sample_ids": [1, 2]}, "2 sample_ids were given for 1 prompts"),
        (np.zeros((2, 3), int), {}, "lengths="),
        (np.zeros((2, 3), int), {"lengths": [1]}, "1 lengths were given for 2 prompts"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        rollout.sample(MODEL, PARAMS, prompts, KEY, **{"max_new_tokens": 20, **settings})


def test_nothing_is_compiled_again_after_warm_up():
    def ask(rows, longest, new_tokens, temperature=1.0, stop_ids=(1,)):
        """A call that is interrupted, and another that ends it, group by group."""
        sizes = RNG.integers(1, longest + 1, size=-(-rows // 2))
        prompts = [RNG.integers(0, V, size=size).tolist() for size in sizes for _ in range(2)]
        settings = {
            "max_new_tokens": new_tokens, "temperature": temperature, "top_p": 0.9, "slots": 8,
            "stop_ids": stop_ids, "capacity": rollout.Capacity(8, 8, 64, 30),
        }  # fmt: skip
        key = jax.random.key(int(RNG.integers(99)))
        begun = rollout.sample(MODEL, PARAMS, prompts, key, budget=3 * rows, **settings)
        rest = rollout.sample_groups(
            MODEL, PARAMS, prompts, key, group_size=1, begun=begun, **settings
        )
        assert len(list(rest)) == len(prompts)

    ask(2, 9, 5)
    before = len(compiles)
    ask(8, 64, 30, 0.5, [2])
    ask(7, 20, 17, 0.8, [60])
    ask(30, 64, 30, 1.0, [9])
    ask(90, 3, 11, 1.1, [4])
    ask(1, 1, 1, 1.3, [4])
    assert len(compiles) == before


def test_a_temperature_of_zero_is_another_program():
    assert settings.Settings(3, temperature=0.0).rules().temperature is None
    assert settings.Settings(3, temperature=0).rules().temperature is None


def test_sizes_are_rounded_up_to_few():
    assert [shapes.bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 48,
    ]  # fmt: skip
    assert [shapes.bucket_length(n) for n in (0, 16, 17, 100, 129, 300, 700)] == [
        16, 16, 32, 128, 256, 384, 768,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_decoding_changes_the_cache_in_place(dtype):
    model = transformer.make_model(
        records.TransformerConfig(
            vocab_size=64, width=32, layers=16, heads=4, kv_heads=2, head_dim=8, mlp_width=32,
            query_scale=0.3, compute_dtype="float32" if dtype == "int8" else dtype,
        )
    )  # fmt: skip
    params = jax.eval_shape(model.init, jax.random.key(0))
    forward = slots.forward_of(model, dtype)
    state = jax.eval_shape(lambda: slots.empty(forward, 16, 1024, 16, jax.random.key(0)))
    rules = settings.Settings(16, stop_ids=(1,)).rules()
    advance = jax.jit(slots.advance, static_argnums=(0, 1), donate_argnums=3)
    lowered = advance.lower(forward, None, params, state, rules, np.int32(4), np.int32(16))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    cache = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < 0.2 * cache
