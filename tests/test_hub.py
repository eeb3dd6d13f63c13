"""Hugging Face folders in and out: what is written is what is read; what cannot be is refused."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxpost import companions, hub, models
from jaxpost.hub import tensors

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = sorted(path.stem for path in (GOLDEN / "families").glob("*.json"))
LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "rope_theta": 500.0,
}
FILES = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
TOKENS = np.arange(12).reshape(2, 6)


def random_model(hf, seed=0):
    """A model with normal parameters (much faster to make here than by a compiled `init`)."""
    config = models.config_from_hf(hf)
    model = models.make_model(config, models.ModelCard(hf, FILES))
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(
        lambda leaf: jnp.asarray(draw.standard_normal(leaf.shape, np.float32)), shapes
    )


def llama(**changes):
    return random_model(LLAMA | changes)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def weights(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def rewrite(folder, change):
    """Saves the folder's weights again after `change` has edited the dictionary of arrays."""
    arrays = dict(weights(folder))
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    hub.save_model(tmp_path / "model", *llama())
    return tmp_path / "model"


@pytest.mark.parametrize("spelling", ["given", "saved"])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_comes_back_unchanged_and_byte_identical(case, spelling, tmp_path):
    hf = json.loads((GOLDEN / "families" / f"{case}.json").read_text())[spelling]
    model, params = random_model(hf)
    hub.save_model(tmp_path / "a", model, params)
    again, loaded = hub.load_model(tmp_path / "a")
    assert again.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
    hub.save_model(tmp_path / "b", again, loaded)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_written_config_carries_both_spellings(tmp_path):
    scaling = {"type": "linear", "factor": 2.5}
    model, params = llama(rope_scaling=scaling, bos_token_id=1, eos_token_id=[2, 3])
    hub.save_model(tmp_path / "a", model, params, dtype="bfloat16")
    hf = json.loads((tmp_path / "a" / "config.json").read_text())
    assert hf["torch_dtype"] == hf["dtype"] == "bfloat16"
    rope = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
    assert hf["rope_parameters"] == hf["rope_scaling"] == rope
    assert hf["rope_theta"] == 500.0
    assert hf["architectures"] == ["LlamaForCausalLM"]
    assert (hf["bos_token_id"], hf["eos_token_id"]) == (1, [2, 3])


def test_kernels_are_transposed_and_layers_keep_their_order(folder):
    _, params = hub.load_model(folder)
    stored = weights(folder)
    for layer in range(3):
        kernel = params["layers"]["down_proj"]["kernel"][layer]
        assert np.array_equal(kernel, stored[f"model.layers.{layer}.mlp.down_proj.weight"].T)


def test_shards_come_back_and_are_byte_identical(tmp_path):
    model, params = llama()
    hub.save_model(tmp_path / "a", model, params, max_shard_bytes=6000)
    index = json.loads((tmp_path / "a" / tensors.INDEX).read_text())
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert index["metadata"]["total_size"] == total
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
    again, loaded = hub.load_model(tmp_path / "a")
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
    hub.save_model(tmp_path / "b", again, loaded, max_shard_bytes=6000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_companions_travel_and_a_tied_head_is_left_out(tmp_path):
    hub.save_model(tmp_path / "a", *llama(tie_word_embeddings=True))
    written = contents(tmp_path / "a")
    assert set(written) == {"config.json", "model.safetensors", *FILES}
    assert "lm_head.weight" not in weights(tmp_path / "a")
    model, _ = hub.load_model(tmp_path / "a")
    assert dict(model.card.files) == FILES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_of_parameters_and_of_activations_are_chosen_apart(dtype, folder, tmp_path):
    model, params = hub.load_model(folder)
    hub.save_model(tmp_path / "half", model, params, dtype=dtype)
    stored_model, stored = hub.load_model(tmp_path / "half")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(stored)} == {dtype}
    assert stored_model.config.compute_dtype == dtype
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), params)
    assert jax.tree.all(jax.tree.map(np.array_equal, stored, expected))
    wide_model, wide = hub.load_model(tmp_path / "half", dtype="float32", compute_dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide)} == {"float32"}
    assert wide_model.config.compute_dtype == "bfloat16"


def test_a_type_may_be_given_as_jax_spells_it(folder):
    model, params = hub.load_model(folder, dtype=jnp.bfloat16, compute_dtype=jnp.float32)
    assert str(params["embedding"].dtype) == "bfloat16"
    assert model.config.compute_dtype == "float32"


def test_mixed_types_are_kept(folder):
    def halve_norms(arrays):
        for name in arrays:
            if "norm" not in name:
                arrays[name] = arrays[name].astype(ml_dtypes.bfloat16)

    rewrite(folder, halve_norms)
    model, params = hub.load_model(folder)
    assert str(params["layers"]["attn_norm"]["scale"].dtype) == "float32"
    assert str(params["layers"]["q_proj"]["kernel"].dtype) == "bfloat16"
    assert model.config.compute_dtype == "bfloat16"


def test_an_embedding_larger_than_a_block_is_read_whole(folder, monkeypatch):
    from jaxpost.hub import reading

    monkeypatch.setattr(reading, "BLOCK_BYTES", 5 * 16 * 4)  # 37 rows in blocks of 5
    _, params = hub.load_model(folder)
    assert np.array_equal(params["embedding"], weights(folder)["model.embed_tokens.weight"])


def test_init_model_gives_a_usable_model():
    hf = LLAMA | {"initializer_range": 0.5}
    model, params = hub.init_model(hf, jax.random.key(0), dtype="bfloat16", files=FILES)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert 0.4 < float(jnp.std(params["layers"]["up_proj"]["kernel"].astype("float32"))) < 0.6
    assert model.config.compute_dtype == "bfloat16"
    assert dict(model.card.files) == FILES
    out = models.logits(model, params, TOKENS)
    assert out.shape == (2, 6, 37)
    assert np.isfinite(out).all()


MEMORY = """
import sys, jax, jax.numpy as jnp
from jaxpost import hub

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

hub.load_model(sys.argv[1])  # whatever the first load of all brings in
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here
model, params = hub.load_model(sys.argv[2], dtype=sys.argv[3])
jax.block_until_ready(params)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print((status("VmHWM") - before) / size)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_host_memory_of_loading_stays_under_1_3_times_the_weights(dtype, folder, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 49_152}
    layers = {"num_hidden_layers": 24, "tie_word_embeddings": True}
    big = llama(**sizes, **layers)
    hub.save_model(tmp_path / "big", *big, dtype=dtype)
    command = [sys.executable, "-c", MEMORY, str(folder), str(tmp_path / "big"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout.split()[-1]) < 1.3


def drop(name):
    return lambda arrays: arrays.pop(name)


def put(name, array):
    return lambda arrays: arrays.update({name: array})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("model.layers.1.mlp.up_proj.weight"), "lacks tensor model.layers.1.mlp.up_proj"),
        (drop("lm_head.weight"), "lacks tensor lm_head.weight"),
        (put("model.layers.3.mlp.up_proj.weight", np.zeros(2)), "float32|F64"),
        (put("model.extra.weight", np.zeros(2, np.float32)), "holds tensor model.extra.weight"),
        (
            put("model.layers.0.mlp.up_proj.weight", np.zeros((24, 15), np.float32)),
            r"up_proj.weight has shape \[24, 15\], but the config asks for \[24, 16\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_file_and_tensor(change, words, folder):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=words) as caught:
        hub.load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_numbers_that_are_not_finite_are_refused_by_file_and_tensor(bad, name, folder):
    def spoil(arrays):
        arrays[name] = arrays[name].copy()
        arrays[name].flat[5] = bad

    rewrite(folder, spoil)
    with pytest.raises(ValueError, match=f"tensor {name} holds 1 numbers that are NaN") as caught:
        hub.load_model(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


def test_numbers_too_large_for_the_type_asked_for_are_refused(folder):
    rewrite(folder, lambda arrays: arrays["model.norm.weight"].fill(1e6))
    hub.load_model(folder, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"model.norm.weight holds 16 .* infinite as float16"):
        hub.load_model(folder, dtype="float16")


def test_harmless_extras_are_accepted(tmp_path):
    model, params = llama(tie_word_embeddings=True)
    hub.save_model(tmp_path / "a", model, params)
    inverse = np.ones(2, np.float32)
    rewrite(tmp_path / "a", put("model.layers.0.self_attn.rotary_emb.inv_freq", inverse))
    rewrite(tmp_path / "a", put("lm_head.weight", np.asarray(params["embedding"])))
    _, loaded = hub.load_model(tmp_path / "a")
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
    rewrite(tmp_path / "a", put("lm_head.weight", np.asarray(params["embedding"]) + 1))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        hub.load_model(tmp_path / "a")


def test_broken_files_are_named(folder, tmp_path):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        hub.load_model(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        hub.load_model(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="only pickled weights"):
        hub.load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        hub.load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        hub.load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        hub.load_model(folder)


def test_an_index_that_lies_is_refused(tmp_path):
    hub.save_model(tmp_path / "a", *llama(), max_shard_bytes=6000)
    index = json.loads((tmp_path / "a" / tensors.INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    lost = next(name for name, file in index["weight_map"].items() if file == first)
    swapped = {**index, "weight_map": {**index["weight_map"], lost: second}}
    (tmp_path / "a" / tensors.INDEX).write_text(json.dumps(swapped))
    with pytest.raises(ValueError, match=f"{first}: holds tensor {lost}, which"):
        hub.load_model(tmp_path / "a")
    (tmp_path / "a" / tensors.INDEX).write_text(json.dumps(index))
    (tmp_path / "a" / first).unlink()
    with pytest.raises(FileNotFoundError, match=f"{first}: missing.*{lost}"):
        hub.load_model(tmp_path / "a")


def test_an_unknown_field_or_architecture_is_refused_by_name(folder):
    path = folder / "config.json"
    hf = json.loads(path.read_text())
    path.write_text(json.dumps(hf | {"moe_router": 3}))
    with pytest.raises(ValueError, match="moe_router"):
        hub.load_model(folder)
    path.write_text(json.dumps(hf | {"model_type": "mamba"}))
    with pytest.raises(ValueError, match="mamba") as caught:
        hub.load_model(folder)
    assert str(caught.value).startswith(f"{folder}/config.json: ")


def test_the_architecture_is_read_without_weights(folder):
    expected = hub.load_model(folder)[0].config
    (folder / "model.safetensors").unlink()
    assert hub.load_config(folder) == expected


def test_a_mistyped_path_is_never_asked_of_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for name in ("./modle", "modle", "a/b/c", "model/checkpoint", str(folder) + "x", "/no/where"):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            hub.load_model(name)
    with pytest.raises(NotADirectoryError, match="a file, not a model folder"):
        hub.load_model(folder / "config.json")


def test_a_hub_id_that_cannot_be_fetched_says_how_to(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match="hf download no-such-owner/no-such-model"):
        hub.load_model("no-such-owner/no-such-model")
    assert "asking the Hugging Face hub" in caplog.text


def test_saving_replaces_a_model_folder_and_nothing_else(folder, tmp_path):
    model, params = llama(num_hidden_layers=1)
    hub.save_model(folder, model, params)
    assert hub.load_model(folder)[0].config.layers == 1
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        hub.save_model(folder, model, params)
    assert contents(folder) == before
    with pytest.raises(FileExistsError, match="is a file"):
        hub.save_model(folder / "notes.txt", model, params)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_what_was_there(folder, tmp_path):
    before = contents(folder)
    model, params = llama()
    bad = model._replace(card=models.ModelCard(model.card.hf_config, {"../escape": b""}))
    with pytest.raises(ValueError, match="escape"):
        hub.save_model(folder, bad, params)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_a_card_or_with_other_params_is_not_written(tmp_path):
    model, params = llama()
    with pytest.raises(ValueError, match=r"model\.card is empty"):
        hub.save_model(tmp_path / "a", models.make_model(model.config), params)
    other = models.make_model(model.config, models.ModelCard(LLAMA | {"rope_theta": 9.0}, {}))
    with pytest.raises(ValueError, match="another architecture"):
        hub.save_model(tmp_path / "a", other, params)
    with pytest.raises(ValueError, match="not this model's parameters"):
        hub.save_model(tmp_path / "a", model, {k: v for k, v in params.items() if k != "lm_head"})


def test_convert_changes_the_type_and_keeps_the_rest(folder, tmp_path):
    hub.convert(folder, tmp_path / "half", dtype="bfloat16")
    model, params = hub.load_model(tmp_path / "half")
    assert str(params["embedding"].dtype) == "bfloat16"
    assert dict(model.card.files) == FILES
    hub.convert(tmp_path / "half", tmp_path / "same")
    assert contents(tmp_path / "half") == contents(tmp_path / "same")
    with pytest.raises(ValueError, match="is the source as well"):
        hub.convert(folder, folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="is the source as well"):
        hub.convert(folder, tmp_path / "link")
    with pytest.raises(ValueError, match=r"inside the source .*; choose another folder"):
        hub.convert(tmp_path / "half", tmp_path / "half" / "below")
    assert not (tmp_path / "half" / "below").exists()


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(ValueError, match=r"float8.*supported: float32, float16, bfloat16"):
        hub.load_model(folder, dtype="float8")


def test_importing_the_hub_loads_no_file_format_library():
    code = (
        "import sys, jaxpost.hub; print([m for m in ('safetensors', 'gguf', 'huggingface_hub', "
        "'tokenizers', 'transformers', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_companion_names_are_those_of_a_folder_read_by_transformers(folder):
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer.model")
    assert set(companions.read(folder)) == {*FILES, "tokenizer.model"}
