"""Reward models in Hugging Face form: those of transformers and TRL come in, ours are theirs."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxpost import hub, models
from jaxpost.hub import pad_token
from jaxpost.models import heads

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = GOLDEN / "reward_models"
REWARDS = json.loads((FOLDERS / "rewards.json").read_text())
CASES = ("llama", "qwen2", "trl")
FAMILIES = sorted(path.stem for path in (GOLDEN / "families").glob("*.json"))
LLAMA = json.loads((FOLDERS / "llama" / "config.json").read_text()) | {
    "architectures": ["LlamaForCausalLM"],
    "id2label": None,
    "label2id": None,
}
HEAD = {"weight": jnp.arange(16.0) - 7.5}


def rewards(model, params, head):
    """Of the golden rows, each read without padding."""
    hidden = (model.apply(params, jnp.array([row]), None, None) for row in REWARDS["rows"])
    return [float(heads.reward(head, states[0, -1])) for states in hidden]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def config(folder):
    return json.loads((folder / "config.json").read_text())


def weights(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def causal(**changes):
    return random_model(LLAMA | changes)


def random_model(hf):
    """A language model (made much faster here than by a compiled `init`)."""
    model = models.make_model(models.config_from_hf(hf), models.ModelCard(hf, {}))
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(
        lambda leaf: jnp.asarray(draw.standard_normal(leaf.shape, np.float32)), shapes
    )


def copied(case, folder, **changes):
    """A golden folder with some fields of its config changed."""
    shutil.copytree(FOLDERS / case, folder)
    (folder / "config.json").write_text(json.dumps(config(folder) | changes))
    return folder


def tokenizer(*names, **settings):
    """Companions of a tokenizer whose added tokens are `names`, numbered from 0."""
    added = [{"id": number, "content": name} for number, name in enumerate(names)]
    return {
        "tokenizer.json": json.dumps({"added_tokens": added}).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


@pytest.mark.parametrize("case", CASES)
def test_rewards_are_those_of_transformers(case):
    loaded = hub.load_reward_model(FOLDERS / case)
    assert np.allclose(rewards(*loaded), REWARDS[case], rtol=0, atol=1e-5)
    assert "lm_head" not in loaded[1]


@pytest.mark.parametrize("case", CASES)
def test_what_was_loaded_is_written_with_the_same_numbers_and_meaning(case, tmp_path):
    hub.save_reward_model(tmp_path / "a", *hub.load_reward_model(FOLDERS / case))
    before, after = weights(FOLDERS / case), weights(tmp_path / "a")
    assert set(before) == set(after)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    written, original = config(tmp_path / "a"), config(FOLDERS / case)
    assert {name: written[name] for name in original} == original
    hub.save_reward_model(tmp_path / "b", *hub.load_reward_model(tmp_path / "a"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_written_as_its_classifier_and_comes_back(case, tmp_path):
    hf = json.loads((GOLDEN / "families" / f"{case}.json").read_text())["saved"]
    model, params = random_model(hf)
    head = {"weight": jnp.arange(1.0, model.config.width + 1)}
    hub.save_reward_model(tmp_path / "a", model, params, head)
    stored = weights(tmp_path / "a")
    assert stored["score.weight"].shape == (1, model.config.width)
    assert "lm_head.weight" not in stored
    _, loaded, loaded_head = hub.load_reward_model(tmp_path / "a")
    assert np.array_equal(loaded_head["weight"], head["weight"])
    rest = {name: value for name, value in params.items() if name != "lm_head"}
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, rest))
    with pytest.raises(ValueError, match="load it with load_reward_model"):
        hub.load_config(tmp_path / "a")


def test_the_config_is_what_transformers_writes(tmp_path):
    hub.save_reward_model(tmp_path / "a", *causal(num_labels=1), HEAD)
    written = config(tmp_path / "a")
    expected = config(FOLDERS / "llama")
    assert {name: written[name] for name in expected} == expected
    assert "num_labels" not in written


def test_types_are_chosen_and_the_head_is_read_in_float32(tmp_path):
    hub.save_reward_model(tmp_path / "a", *causal(), HEAD, dtype="bfloat16")
    assert {str(array.dtype) for array in weights(tmp_path / "a").values()} == {"bfloat16"}
    model, params, head = hub.load_reward_model(tmp_path / "a", compute_dtype="float32")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert (head["weight"].dtype, model.config.compute_dtype) == (jnp.float32, "float32")
    _, wide, _ = hub.load_reward_model(tmp_path / "a", dtype="float32")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide)} == {"float32"}


def test_adapters_are_folded_in(tmp_path):
    model, params, head = hub.load_reward_model(FOLDERS / "llama")
    adapted = hub.add_lora(model, params, models.LoRA(rank=2), jax.random.key(0))
    params = jax.tree.map_with_path(
        lambda path, leaf: leaf + 0.1 if path[-1].key == "lora_b" else leaf, adapted[1]
    )
    hub.save_reward_model(tmp_path / "a", adapted[0], params, head)
    found = rewards(*hub.load_reward_model(tmp_path / "a"))
    assert np.allclose(found, rewards(adapted[0], params, head), rtol=0, atol=1e-5)
    assert not np.allclose(found, REWARDS["llama"], rtol=0, atol=1e-2)


def test_a_reward_is_a_scalar_product_in_float32():
    head = heads.reward_head(2)
    hidden = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.bfloat16)
    assert heads.reward(head, hidden).tolist() == [0.0, 0.0]
    found = heads.reward({"weight": jnp.array([0.5, -1.0])}, hidden)
    assert (found.tolist(), found.dtype) == ([-1.5, -2.5], jnp.float32)


def test_a_causal_model_and_a_reward_model_are_not_taken_for_each_other(tmp_path):
    hub.save_model(tmp_path / "causal", *causal())
    with pytest.raises(ValueError, match=r"causal language model .* load it with load_model"):
        hub.load_reward_model(tmp_path / "causal")
    with pytest.raises(ValueError, match=r"is a reward model, .* load it with load_reward_model"):
        hub.load_model(FOLDERS / "llama")
    model, params, _ = hub.load_reward_model(FOLDERS / "llama")
    with pytest.raises(ValueError, match="use save_reward_model"):
        hub.save_model(tmp_path / "a", model, params)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "a classifier of 2 labels"),
        ({"id2label": None}, "a classifier of 2 labels"),
        ({"id2label": None, "num_labels": 3}, "a classifier of 3 labels"),
        ({"architectures": ["LlamaForTokenClassification"]}, "is no reward model"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "is no reward model"),
        ({"moe_router": 3}, "moe_router"),
        ({"hidden_size": 20}, r"score.weight has shape \[1, 16\], but the config asks"),
    ],
)
def test_configs_of_something_else_are_refused(changes, words, tmp_path):
    folder = copied("llama", tmp_path / "a", **changes)
    with pytest.raises(ValueError, match=words) as caught:
        hub.load_reward_model(folder)
    assert str(folder) in str(caught.value)


def test_the_count_of_labels_may_stand_in_either_field(tmp_path):
    folder = copied("llama", tmp_path / "a", id2label=None, num_labels=1, architectures=None)
    found = rewards(*hub.load_reward_model(folder))
    assert np.allclose(found, REWARDS["llama"], rtol=0, atol=1e-5)


def test_a_head_is_needed_and_a_language_model_head_is_left_with_a_word(tmp_path, caplog):
    folder = copied("llama", tmp_path / "a")
    arrays = weights(folder)
    spare = arrays | {"lm_head.weight": np.ones((48, 16), np.float32)}
    safetensors.numpy.save_file(spare, folder / "model.safetensors")
    found = rewards(*hub.load_reward_model(folder))
    assert np.allclose(found, REWARDS["llama"], rtol=0, atol=1e-5)
    assert "lm_head.weight is not read" in caplog.text
    del arrays["score.weight"]
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks tensor score\.weight"):
        hub.load_reward_model(folder)


@pytest.mark.parametrize("head", [heads.zero_head(16), heads.reward_head(15), {}])
def test_a_head_that_cannot_be_stored_is_refused(head, tmp_path):
    with pytest.raises(ValueError, match=r"a reward model stores \{'weight': \(16,\)\}"):
        hub.save_reward_model(tmp_path / "a", *causal(), head)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("names", "settings", "pad_id", "expected"),
    [
        (("</s>", "<pad>"), {"eos_token": "</s>", "pad_token": "<pad>"}, 1, (1, "<pad>")),
        (("</s>", "<pad>"), {"eos_token": "</s>", "pad_token": "</s>"}, 0, (1, "<pad>")),
        (("</s>", "x", "y"), {"eos_token": "</s>", "pad_token": {"content": "y"}}, 1, (2, "y")),
        (("</s>", "x", "y"), {"eos_token": "</s>", "pad_token": "</s>"}, 1, (1, "x")),
        (("<unk>", "<s>", "</s>"), {"eos_token": "</s>"}, None, (0, "<unk>")),
        (("<|end|>", "<|start|>"), {"eos_token": "<|end|>"}, None, (1, "<|start|>")),
        (("</s>", "<|turn_ends|>"), {"eos_token": "</s>"}, None, (None, None)),
    ],
)
def test_padding_never_ends_a_text_and_the_tokenizer_agrees(names, settings, pad_id, expected):
    files = tokenizer(*names, **settings)
    hf = {"pad_token_id": pad_id, "eos_token_id": None}
    token_id, after = pad_token.chosen(models.ModelCard(hf, files), 100)
    declared = pad_token.declared(models.ModelCard(hf, after), "pad_token")
    assert (token_id, declared) == expected
    assert after["tokenizer.json"] == files["tokenizer.json"]


@pytest.mark.parametrize(("eos", "expected"), [(1, 0), (0, None), ([1, 0], None)])
def test_without_a_tokenizer_the_config_decides(eos, expected, tmp_path, caplog):
    hub.save_reward_model(tmp_path / "a", *causal(eos_token_id=eos), HEAD)
    assert config(tmp_path / "a")["pad_token_id"] == expected
    assert ("one row at a time" in caplog.text) == (expected is None)


def test_a_folder_that_transformers_reads_before_the_last_token_is_announced(tmp_path, caplog):
    hub.load_reward_model(FOLDERS / "trl")
    assert not caplog.text
    hub.load_reward_model(copied("trl", tmp_path / "a", pad_token_id=1))
    assert "reads its rewards at the token before" in caplog.text
