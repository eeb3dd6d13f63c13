"""LoRA: adapters that change nothing at first, merge exactly, and are PEFT's in and out."""

import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxpost import hub, models
from jaxpost.models import LoRA
from jaxpost.models import lora as low_rank

GOLDEN = pathlib.Path(__file__).parent / "golden" / "adapters"
TOKENS = np.load(GOLDEN / "tokens.npy")
CASES = ("plain", "patterns", "regex")


@pytest.fixture(scope="module")
def base():
    return hub.load_model(GOLDEN / "base")


@pytest.fixture(scope="module")
def plain_logits(base):
    return models.logits(*base, TOKENS)


@pytest.fixture
def adapter(tmp_path):
    """A PEFT adapter folder to spoil."""
    return pathlib.Path(shutil.copytree(GOLDEN / "plain", tmp_path / "adapter"))


def with_random_b(params, scale=0.1):
    """The parameters with every B drawn, as training would leave it."""
    draw = np.random.default_rng(3)

    def fill(path, leaf):
        if path[-1].key != "lora_b":
            return leaf
        return jnp.asarray(scale * draw.standard_normal(leaf.shape, np.float32))

    return jax.tree.map_with_path(fill, params)


def spoil(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_fresh_adapters_leave_the_logits_alone(base, plain_logits):
    model, params = hub.add_lora(*base, LoRA(rank=3), jax.random.key(0))
    assert params["layers"]["q_proj"]["lora_a"].shape == (3, 24, 3)
    assert params["layers"]["k_proj"]["lora_b"].shape == (3, 3, 12)
    assert np.array_equal(models.logits(model, params, TOKENS), plain_logits)
    a = params["layers"]["down_proj"]["lora_a"]
    assert 0.9 / math.sqrt(40) < float(jnp.abs(a).max()) <= 1 / math.sqrt(40)


def test_an_adapter_does_not_depend_on_which_others_there_are(base):
    _, some = hub.add_lora(*base, LoRA(targets=("v_proj",)), jax.random.key(0))
    _, every = hub.add_lora(*base, LoRA(), jax.random.key(0))
    a, same = (params["layers"]["v_proj"]["lora_a"] for params in (some, every))
    assert np.array_equal(a, same)
    assert "lora_a" not in some["layers"]["q_proj"]


def test_only_adapters_are_trainable(base):
    _, params = hub.add_lora(*base, LoRA(targets=("(gate|up)_proj",)), jax.random.key(0))
    marked = jax.tree.leaves_with_path(hub.trainable(params))
    names = {"/".join(key.key for key in path) for path, value in marked if value}
    projections = ("gate_proj", "up_proj")
    assert names == {f"layers/{name}/lora_{leaf}" for name in projections for leaf in "ab"}
    assert not any(jax.tree.leaves(hub.trainable(base[1])))


def test_scale_is_alpha_over_rank_or_its_root(base):
    """One adapter by hand: kernel + scale · A B, scale = 6/3 or 6/√3."""
    for stabilized, scale in ((False, 2.0), (True, 6 / math.sqrt(3))):
        lora = LoRA(rank=3, alpha=6, targets=("o_proj",), rank_stabilized=stabilized)
        model, params = hub.add_lora(*base, lora, jax.random.key(0))
        params = with_random_b(params)
        _, merged = hub.merge(model, params)
        leaves = params["layers"]["o_proj"]
        by_hand = leaves["kernel"][1] + scale * leaves["lora_a"][1] @ leaves["lora_b"][1]
        assert np.allclose(merged["layers"]["o_proj"]["kernel"][1], by_hand, atol=1e-6)


def test_merged_logits_equal_unmerged(base, plain_logits):
    lora = LoRA(rank=4, ranks=(("up_proj", 2),), alphas=(("q_proj", 7.0),), rank_stabilized=True)
    model, params = hub.add_lora(*base, lora, jax.random.key(0))
    params = with_random_b(params)
    merged_model, merged = hub.merge(model, params)
    unmerged_logits = models.logits(model, params, TOKENS)
    assert float(jnp.abs(unmerged_logits - plain_logits).max()) > 0.1
    assert (
        float(jnp.abs(models.logits(merged_model, merged, TOKENS) - unmerged_logits).max()) < 1e-5
    )
    assert merged_model.config.lora is None
    assert jax.tree.structure(merged) == jax.tree.structure(base[1])


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (LoRA(targets=("q_proj", "query")), "'query' matches no projection.*q_proj, k_proj"),
        (LoRA(targets=()), "without targets"),
        (LoRA(rank=0), "must be at least 1"),
        (LoRA(targets=("q_proj",), ranks=(("v_proj", 2),)), "'v_proj', which is not a target"),
    ],
)
def test_a_configuration_without_effect_is_refused(lora, words, base):
    with pytest.raises(ValueError, match=words):
        hub.add_lora(*base, lora, jax.random.key(0))


def test_adapters_are_added_once(base):
    model, params = hub.add_lora(*base, LoRA(), jax.random.key(0))
    with pytest.raises(ValueError, match="already hold"):
        hub.add_lora(model, params, LoRA(), jax.random.key(0))
    with pytest.raises(ValueError, match="merge them first"):
        hub.load_adapter(GOLDEN / "plain", model, params)


@pytest.mark.parametrize("case", CASES)
def test_adapters_made_by_peft_give_its_logits(case, base):
    model, params = hub.load_adapter(GOLDEN / case, *base)
    expected = np.load(GOLDEN / case / "logits.npy")
    assert np.abs(np.asarray(models.logits(model, params, TOKENS)) - expected).max() < 1e-4
    merged = hub.merge(model, params)
    assert np.abs(np.asarray(models.logits(*merged, TOKENS)) - expected).max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_comes_back_bit_for_bit(case, base, tmp_path):
    model, params = hub.load_adapter(GOLDEN / case, *base)
    hub.save_adapter(tmp_path / "a", model, params, base_model="some/base")
    ours = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    theirs = safetensors.numpy.load_file(GOLDEN / case / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    again, loaded = hub.load_adapter(tmp_path / "a", *base)
    assert again.config.lora == model.config.lora
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
    hub.save_adapter(tmp_path / "b", again, loaded, base_model="some/base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layers_to_transform": 0}, "layers_to_transform = 0"),
        ({"layers_to_transform": [0, 1]}, "layers_to_transform"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow = 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head', which is none of this"),
        ({"target_modules": r".*layers\.0\.self_attn\.q_proj"}, "q_proj in some layers only"),
        ({"rank_pattern": {r"layers.1.self_attn.q_proj": 2}}, "q_proj different values by layer"),
        ({"target_modules": ["q_proj"]}, "belongs to no target"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "lacks tensor .*o_proj.lora_A"),
        ({"r": 5}, r"lora_A.weight has shape \[4, 24\], but"),
        ({"r": None}, "r = None; a value is needed"),
    ],
)
def test_adapters_that_are_more_than_plain_lora_are_refused_by_name(fields, words, base, adapter):
    spoil(adapter, **fields)
    with pytest.raises(ValueError, match=words) as caught:
        hub.load_adapter(adapter, *base)
    assert str(adapter) in str(caught.value)


def test_a_pickled_adapter_is_not_read(base, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="is a pickle, which is not read"):
        hub.load_adapter(adapter, *base)
    with pytest.raises(FileNotFoundError, match="call load_adapter"):
        hub.load_model(adapter)


def test_a_model_with_adapters_is_saved_merged_or_not_at_all(base, tmp_path):
    model, params = hub.load_adapter(GOLDEN / "patterns", *base)
    with pytest.raises(ValueError, match=r"merge=True .*save_adapter"):
        hub.save_model(tmp_path / "a", model, params)
    hub.save_model(tmp_path / "a", model, params, merge=True)
    out = models.logits(*hub.load_model(tmp_path / "a"), TOKENS)
    assert np.abs(out - np.load(GOLDEN / "patterns" / "logits.npy")).max() < 1e-4
    with pytest.raises(ValueError, match="has no LoRA adapters"):
        hub.save_adapter(tmp_path / "b", *base)


def test_convert_folds_an_adapter_in(adapter, tmp_path):
    expected = np.load(GOLDEN / "plain" / "logits.npy")
    hub.convert(GOLDEN / "base", tmp_path / "a", adapter=adapter)
    spoil(adapter, base_model_name_or_path=str(GOLDEN / "base"))
    hub.convert(adapter, tmp_path / "b")
    for name in "ab":
        out = models.logits(*hub.load_model(tmp_path / name), TOKENS)
        assert np.abs(out - expected).max() < 1e-4
    spoil(adapter, base_model_name_or_path=None)
    with pytest.raises(ValueError, match="base_model_name_or_path is empty"):
        hub.convert(adapter, tmp_path / "c")


def test_loading_with_lora_adds_fresh_adapters(base, plain_logits):
    model, params = hub.load_model(GOLDEN / "base", lora=LoRA(rank=2, targets=("v_proj",)))
    assert low_rank.has_lora(params)
    assert np.array_equal(models.logits(model, params, TOKENS), plain_logits)


def test_adapters_stay_float32_and_kernels_keep_their_type():
    half = hub.load_model(GOLDEN / "base", dtype="bfloat16")
    model, params = hub.add_lora(*half, LoRA(), jax.random.key(0))
    assert str(params["layers"]["q_proj"]["lora_a"].dtype) == "float32"
    _, merged = hub.merge(model, with_random_b(params))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(merged)} == {"bfloat16"}
