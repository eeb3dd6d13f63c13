"""Process reward models in Hugging Face form: token classifiers of two labels, our one logit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_reward_models import HEAD, LLAMA, causal, config, weights

from jaxpost import hub
from jaxpost.models import heads

STEPS = {"weight": HEAD["weight"] / 4, "bias": jnp.float32(0.5)}
ROWS = jnp.array([[1, 2, 3, 4, 5]])


def saved(folder, head=STEPS, **changes):
    hub.save_process_reward_model(folder, *causal(**changes), head)
    return folder


def logits(model, params, head):
    return np.asarray(heads.read(head, model.apply(params, ROWS, None, None)))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_what_is_loaded(tied, tmp_path):
    folder = saved(tmp_path / "model", tie_word_embeddings=tied)
    model, params, head = hub.load_process_reward_model(folder)
    expected = logits(*causal(tie_word_embeddings=tied), STEPS)
    np.testing.assert_allclose(logits(model, params, head), expected, rtol=1e-6, atol=1e-6)
    hub.save_process_reward_model(tmp_path / "again", model, params, head)
    assert config(tmp_path / "again") == config(folder)
    before, after = weights(folder), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_two_labels_softmax_is_the_sigmoid_of_the_logit(tmp_path):
    """transformers' head: hidden · scoreᵀ + bias, of which label 1 is that of right steps."""
    folder = saved(tmp_path / "model")
    stored, (model, params) = weights(folder), causal()
    assert stored["score.weight"].shape == (2, 16)
    hidden = np.asarray(model.apply(params, ROWS, None, None))
    both = hidden @ stored["score.weight"].T + stored["score.bias"]
    right = jax.nn.softmax(both, axis=-1)[..., 1]
    expected = jax.nn.sigmoid(logits(model, params, STEPS))
    np.testing.assert_allclose(right, expected, rtol=1e-5, atol=1e-6)
    told = config(folder)
    assert told["architectures"] == ["LlamaForTokenClassification"]
    assert len(told["id2label"]) == 2
    assert told["jaxpost"] == {"kind": "process_reward_model", "step_separator": "\n"}


def test_a_folder_of_one_label_has_the_logit_itself_and_a_bias_may_be_missing(tmp_path):
    folder = saved(tmp_path / "model")
    stored = weights(folder)
    del stored["score.bias"]
    stored["score.weight"] = np.asarray(STEPS["weight"])[None]
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    changed = config(folder) | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(changed))
    _, _, head = hub.load_process_reward_model(folder)
    np.testing.assert_array_equal(head["weight"], STEPS["weight"])
    assert head["bias"] == 0


def test_other_folders_and_heads_are_refused(tmp_path):
    folder = saved(tmp_path / "model")
    with pytest.raises(ValueError, match="load it with load_process_reward_model"):
        hub.load_model(folder)
    with pytest.raises(ValueError, match="is no reward model"):
        hub.load_reward_model(folder)
    hub.save_model(tmp_path / "causal", *causal())
    with pytest.raises(ValueError, match="is no process reward model"):
        hub.load_process_reward_model(tmp_path / "causal")
    changed = config(folder) | {"id2label": {str(n): f"L{n}" for n in range(3)}, "label2id": {}}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="with 3 labels"):
        hub.load_process_reward_model(folder)
    with pytest.raises(ValueError, match=r"has a weight \[16\] and a bias"):
        saved(tmp_path / "no_bias", HEAD)
    model, params = causal()
    card = model.card._replace(hf_config={**LLAMA, "model_type": "gemma3_text"})
    with pytest.raises(ValueError, match="has no token classifier in transformers"):
        hub.save_process_reward_model(tmp_path / "x", model._replace(card=card), params, STEPS)
