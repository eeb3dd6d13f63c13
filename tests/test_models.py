"""The transformer against transformers' own numbers, and its own invariances."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import attention, models
from jaxpost.models import transformer
from jaxpost.models.model import Rope, TransformerConfig

FAMILIES = pathlib.Path(__file__).parent / "golden" / "families"
CASES = sorted(path.stem for path in FAMILIES.glob("*.npz"))
ONE_OF_EACH = [
    "gemma2",
    "gemma3_default_pattern",
    "llama_llama3_biases",
    "mistral_window",
    "qwen2_sliding",
    "qwen3_sliding_tied",
]
# Most of the time here is compilation, and none of these models runs long enough to repay it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
SMALL = TransformerConfig(
    vocab_size=17,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp_width=12,
    query_scale=0.5,
)


def read(case: str) -> tuple[dict[str, Any], Any]:
    """A golden case: its config as given and as saved, and its arrays."""
    return json.loads((FAMILIES / f"{case}.json").read_text()), np.load(FAMILIES / f"{case}.npz")


def flat(params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def load(case: str) -> tuple[models.Model, dict[str, Any], Any]:
    """A golden case as model, parameters and arrays, put together by the family's name map."""
    configs, arrays = read(case)
    config = models.config_from_hf(configs["given"])
    params: dict[str, Any] = {}
    for ours, theirs in models.names_from_hf(configs["given"], config).items():
        stacked = "{}" in theirs
        names = [theirs.format(layer) for layer in range(config.layers if stacked else 1)]
        leaves = [arrays[f"weights/{name}"].astype(np.float32) for name in names]
        if ours.endswith("kernel"):
            leaves = [leaf.T for leaf in leaves]
        node, (*parents, last) = params, ours.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.asarray(np.stack(leaves) if stacked else leaves[0])
    return models.make_model(config), params, arrays


def small(**changes) -> tuple[models.Model, dict[str, Any]]:
    """The small model with some changes to its architecture, and random parameters.

    They come from NumPy, since compiling the model's own `init` takes longer than the tests.
    """
    model = models.make_model(dataclasses.replace(SMALL, **changes))
    generator = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(
        lambda leaf: generator.normal(0, 0.5, leaf.shape).astype(np.float32), shapes
    )


def tokens_of(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, shape), jnp.int32)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    model, params, arrays = load(case)
    logits = quick_jit(lambda p: models.logits(model, p, arrays["tokens"], arrays["segment_ids"]))
    real = arrays["segment_ids"] > 0
    difference = np.abs(np.asarray(logits(params)) - arrays["logits"])[real]
    assert difference.max() < 1e-4
    assert np.abs(arrays["logits"][real]).max() > 1


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_a_config_are_one_architecture(case):
    configs, _ = read(case)
    assert models.config_from_hf(configs["given"]) == models.config_from_hf(configs["saved"])


@pytest.mark.parametrize("case", CASES)
def test_the_name_map_covers_parameters_and_tensors_exactly(case):
    configs, arrays = read(case)
    config = models.config_from_hf(configs["given"])
    names = models.names_from_hf(configs["given"], config)
    shapes = jax.eval_shape(models.make_model(config).init, jax.random.key(0))
    assert set(names) == set(flat(shapes))
    theirs = {name.format(i) for name in names.values() for i in range(config.layers)}
    assert theirs == {
        name.removeprefix("weights/") for name in arrays if name.startswith("weights/")
    }
    assert len(set(names.values())) == len(names)
    loaded = flat(load(case)[1])
    assert {name: leaf.shape for name, leaf in loaded.items()} == {
        name: leaf.shape for name, leaf in flat(shapes).items()
    }


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_decoding_equals_reading_at_once(case):
    """Prefill in two parts with rows of different lengths, then token by token."""
    model, params, arrays = load(case)
    tokens = arrays["tokens"][:3, :24]
    expected = np.asarray(quick_jit(model.apply)(params, tokens))
    decode = quick_jit(model.decode)
    cache = model.init_cache(3, 24)
    done = np.zeros(3, np.int32)
    for lengths, width in [((9, 6, 1), 9), ((9, 9, 9), 9), *[((1, 1, 1), 1)] * 6]:
        # What a short row reads beyond its own length is junk that a later part overwrites.
        part = np.zeros((3, width), np.int32)
        for row, length in enumerate(lengths):
            part[row, :length] = tokens[row, done[row] : done[row] + length]
        hidden, cache = decode(params, part, cache, done)
        for row, length in enumerate(lengths):
            want = expected[row, done[row] : done[row] + length]
            np.testing.assert_allclose(hidden[row, :length], want, rtol=0, atol=1e-4)
        done = done + np.array(lengths, np.int32)
    assert done.tolist() == [24, 21, 16]


@pytest.mark.parametrize("case", ["gemma3_default_pattern", "qwen2_sliding"])
def test_packed_equals_unpacked_and_padding_is_inert(case):
    model, params, arrays = load(case)
    tokens = arrays["tokens"][0]
    apply = quick_jit(model.apply)
    packed = tokens[None].repeat(2, axis=0)
    packed[1, 33:] = 1  # other content of the padding
    segments = np.array([[1] * 9 + [2] * 17 + [3] * 7 + [0] * 7] * 2, np.int32)
    hidden = np.asarray(apply(params, packed, segments))
    alone = np.zeros((2, 40), np.int32)
    alone[0, :17], alone[1, :9] = tokens[9:26], tokens[:9]
    separate = np.asarray(apply(params, alone, np.ones_like(alone)))
    np.testing.assert_allclose(hidden[0, 9:26], separate[0, :17], rtol=0, atol=1e-5)
    np.testing.assert_allclose(hidden[0, :9], separate[1, :9], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(hidden[0, :33], hidden[1, :33])


def test_positions_restart_with_each_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [0, 0, 5, 5, 5, 5]])
    expected = [[0, 1, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3]]
    assert transformer.positions_of(segments).tolist() == expected


def test_given_positions_are_used():
    model, params = small()
    tokens, segments = tokens_of((1, 6)), jnp.array([[1, 1, 1, 2, 2, 2]])
    logits = quick_jit(lambda positions: models.logits(model, params, tokens, segments, positions))
    restarting = logits(None)
    given, stretched = (
        logits(np.array([[0, 1, 2, 0, 1, 2]])),
        logits(np.array([[0, 3, 9, 0, 1, 2]])),
    )
    np.testing.assert_allclose(restarting, given, atol=1e-6)
    assert np.abs(restarting - stretched)[0, 2].max() > 1e-3
    np.testing.assert_allclose(restarting[0, 3:], stretched[0, 3:], atol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_long_rows_attend_in_chunks_as_at_once(window):
    """300 queries are cut into three chunks; a direct computation in NumPy is not."""
    generator = np.random.default_rng(0)
    q = generator.normal(size=(1, 300, 4, 6)).astype(np.float32)
    k, v = generator.normal(size=(2, 1, 300, 2, 6)).astype(np.float32)
    segments = np.repeat([1, 2, 0], [40, 210, 50])[None]
    arrays = map(jnp.asarray, (q, k, v, segments))
    attended = attention.attend(*arrays, scale=0.7, window=window, softcap=2.0)
    age = np.arange(300)[:, None] - np.arange(300)
    visible = (age >= 0) & (segments[0][:, None] == segments[0]) & (age < (window or 300))
    for head in range(4):
        scores = 2 * np.tanh(0.7 * q[0, :, head] @ k[0, :, head // 2].T / 2)
        weights = np.where(visible, np.exp(scores), 0)
        expected = weights @ v[0, :, head // 2] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(attended[0, :, head], expected, atol=1e-5)


def test_a_window_ends_where_it_says():
    """With window 3 and one layer, token t's state depends on tokens t-2 … t and no other."""
    model, params = small(layers=1, window=3, local_layers=(True,))
    tokens = tokens_of((1, 8))
    changed = tokens.at[0, 2].set((tokens[0, 2] + 1) % SMALL.vocab_size)
    apply = quick_jit(model.apply)
    difference = np.abs(apply(params, tokens) - apply(params, changed))[0].max(axis=-1)
    assert (difference > 1e-6).tolist() == [False, False, True, True, True, False, False, False]


def test_the_graph_does_not_grow_with_depth():
    def size(layers: int) -> int:
        config = dataclasses.replace(
            SMALL, layers=layers, window=4, local_layers=(True, False) * (layers // 2)
        )
        model = models.make_model(config)
        params = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params):
            return model.apply(params, tokens_of((1, 8))).sum()

        return len(jax.jit(jax.grad(loss)).lower(params).as_text())

    assert abs(size(8) - size(2)) < 0.02 * size(2)


def test_remat_changes_no_gradient():
    tokens = tokens_of((2, 9))

    def gradient(remat):
        model, params = small(remat=remat)
        return quick_jit(jax.grad(lambda p: jnp.square(model.apply(p, tokens)[:, ::2]).sum()))(
            params
        )

    plain = gradient("none")
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain)) > 0.1
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            plain,
            gradient(remat),
        )


def test_attention_is_computed_again_only_under_full_remat():
    """A row's highest score is taken once in the forward pass, and never in the backward pass."""

    def maxima(remat):
        model, params = small(remat=remat)
        backward = jax.make_jaxpr(jax.grad(lambda p: model.apply(p, tokens_of((1, 4))).sum()))
        return str(backward(params)).count("reduce_max")

    assert (maxima("none"), maxima("dots"), maxima("full")) == (1, 1, 2)


def test_compute_type_is_apart_from_parameter_type():
    model, params = small(compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    hidden = quick_jit(model.apply)(params, tokens_of((1, 5)))
    assert hidden.dtype == jnp.bfloat16
    assert model.unembed(params, hidden).dtype == jnp.float32
    assert model.init_cache(1, 5).keys.dtype == jnp.bfloat16
    reference = quick_jit(small()[0].apply)(params, tokens_of((1, 5)))
    np.testing.assert_allclose(hidden.astype(np.float32), reference, atol=0.15)


def test_fresh_parameters_have_the_configured_spread():
    model = models.make_model(dataclasses.replace(SMALL, width=64, mlp_width=64, init_std=0.3))
    params = quick_jit(model.init)(jax.random.key(1))
    for leaf in (params["embedding"], params["layers"]["up_proj"]["kernel"]):
        assert float(jnp.std(leaf)) == pytest.approx(0.3, rel=0.1)
    first, second = params["layers"]["up_proj"]["kernel"]
    assert not jnp.array_equal(first, second)
    np.testing.assert_array_equal(params["layers"]["attn_norm"]["scale"], np.ones((2, 64)))


def test_noise_is_added_to_the_embeddings():
    model, params = small()
    tokens = tokens_of((1, 5))
    other = jnp.roll(tokens, 1, axis=1)
    noise = params["embedding"][other] - params["embedding"][tokens]
    noisy = quick_jit(model.apply)(params, tokens, None, None, noise)
    np.testing.assert_allclose(noisy, quick_jit(model.apply)(params, other), atol=1e-5)


def test_rope_frequencies_by_hand():
    """Two pairs, theta 100: 1 and 1/10 radians a position."""
    plain, _ = transformer.rope_frequencies(Rope(theta=100.0), 4)
    np.testing.assert_allclose(plain, [1.0, 0.1])
    linear, _ = transformer.rope_frequencies(Rope(theta=100.0, kind="linear", factor=4.0), 4)
    np.testing.assert_allclose(linear, [0.25, 0.025])
    # Over 40 positions the pairs turn 40 / 2π = 6.37 and 0.637 times: the first is above
    # high_freq_factor and kept, the second below low_freq_factor and divided by 8.
    rope = Rope(theta=100.0, kind="llama3", factor=8.0, original_max_positions=40)
    np.testing.assert_allclose(transformer.rope_frequencies(rope, 4)[0], [1.0, 0.0125])
    # At 4 and 0 the blend of the second pair is 0.637 / 4.
    rope = dataclasses.replace(rope, low_freq_factor=0.0)
    blend = 40 * 0.1 / (2 * np.pi) / 4
    expected = [1.0, blend * 0.1 + (1 - blend) * 0.0125]
    np.testing.assert_allclose(transformer.rope_frequencies(rope, 4)[0], expected)
    _, factor = transformer.rope_frequencies(Rope(kind="yarn", factor=np.e), 4)
    assert factor == pytest.approx(1.1)


# Published configs, in the spelling of their hub files, with the models' published sizes.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
PUBLISHED = {
    "SmolLM2-135M": (
        134_515_008,
        {
            **LLAMA,
            **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
            **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
            **{"rope_theta": 100000, "rope_scaling": None, "rope_interleaved": False},
            **{"tie_word_embeddings": True, "is_llama_config": True, "transformers.js_config": {}},
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            **LLAMA,
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
            **{"head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True},
            "rope_scaling": {
                **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            **{"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
            **{"sliding_window": None, "rope_theta": 1000000.0, "tie_word_embeddings": False},
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
            **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
            **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24},
            **{"use_mrope": False, "rope_theta": 1000000.0, "tie_word_embeddings": True},
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
            **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28},
            **{"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True},
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {
            **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 256},
            **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
            **{"cache_implementation": "hybrid", "query_pre_attn_scalar": 256},
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        {
            **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
            **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
            **{"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144},
            **{"head_dim": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000},
            **{"attn_logit_softcapping": None, "sliding_window_pattern": 6, "rope_scaling": None},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_number_of_parameters(name):
    count, hf = PUBLISHED[name]
    shapes = jax.eval_shape(models.make_model(models.config_from_hf(hf)).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def base(model_type: str) -> dict[str, Any]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    values = {name: 24 for name in (*sizes, "num_attention_heads", "head_dim")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {**values, **heads, "model_type": model_type}


REFUSED = [
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act = 'relu2'.*silu"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    ("llama", {"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence.*CausalLM"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3.*divisor"),
    ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 32}, "num_key_value_heads = 32"),
    ("llama", {"hidden_size": None}, "hidden_size = None"),
    ("llama", {"hidden_size": 22, "head_dim": None}, "hidden_size = 22.*multiple"),
    ("llama", {"head_dim": 7}, "head_dim = 7.*even"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps = True"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic.*linear, llama3, yarn"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 1}},
        "rope_scaling.alpha = 1 is not supported",
    ),
    (
        "llama",
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}},
        "rope_theta = 10000.0.*rope_parameters",
    ),
    (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    ("mistral", {"layer_types": ["full_attention"] * 24}, "layer_types"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ("mistral", {"attention_bias": True}, "attention_bias = True"),
    ("qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types.*24"),
    ("qwen3", {"layer_types": ["linear_attention"] * 24}, "layer_types.*sliding_attention"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 24}, "sliding_window"),
    ("gemma2", {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}, "hidden_act"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (
        "gemma3_text",
        {"layer_types": ["full_attention"] * 24, "sliding_window_pattern": 2},
        "sliding_window_pattern",
    ),
    ("gemma3", {"text_config": {}}, "'gemma3'.*multimodal.*gemma3_text"),
    ("qwen3_moe", {}, "'qwen3_moe'.*gemma2, gemma3_text, llama, mistral, qwen2, qwen3"),
]


@pytest.mark.parametrize(("model_type", "change", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(model_type, change, message):
    with pytest.raises(ValueError, match=message):
        models.config_from_hf({**base(model_type), **change})


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_missing_size_is_named(missing):
    fields = base("llama")
    del fields[missing]
    with pytest.raises(ValueError, match=f"field {missing} is missing"):
        models.config_from_hf(fields)


def test_gemma_3_layers_are_local_but_for_every_sixth():
    config = models.config_from_hf(base("gemma3_text"))
    assert [i for i, local in enumerate(config.local_layers) if not local] == [5, 11, 17, 23]
    assert config.rope == Rope(theta=1_000_000.0)
    assert config.rope_local == Rope(theta=10_000.0)
