"""A reward model as what judges completions in RL, alone and beside a verifier."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import hub, rewards
from jaxpost.data import tokenizers
from jaxpost.models import heads
from jaxpost.recipes import judge

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model with a byte tokenizer."""
    path = tmp_path_factory.mktemp("judge") / "model"
    tokenizer = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
    hf_config = {**TINY, "vocab_size": tokenizer.vocab_size}
    model, params = hub.init_model(hf_config, jax.random.key(0), files=tokenizer.files)
    head = {"weight": jax.random.normal(jax.random.key(1), (16,))}
    hub.save_reward_model(path, model, params, head)
    return path


def items() -> list[rewards.Item]:
    said = [("one:", "two"), ("a", "bcd"), ("long", "x" * 100), ("say", "")]
    return [rewards.Item(prompt, completion, {}) for prompt, completion in said]


def test_the_reward_is_read_after_the_last_token(folder):
    """Each conversation in a row of its own gives the same number; one has no room."""
    scored = judge.RewardModel(str(folder))
    found = scored(items())
    model, params, head = hub.load_reward_model(folder)
    for item, reward in zip(items(), found, strict=True):
        tokens = scored.tokens_of(item)
        if len(tokens) > 32:
            assert math.isnan(reward)
            continue
        row = jnp.asarray(tokens)[None]
        hidden = model.apply(params, row, jnp.ones_like(row), jnp.arange(len(tokens))[None], None)
        np.testing.assert_allclose(reward, heads.reward(head, hidden[0, -1]), rtol=1e-4)
    assert np.isnan(found).tolist() == [False, False, True, False]


def test_a_reward_model_alone_and_beside_a_verifier(folder):
    """R = R_verifier + λ σ(r); what the verifier cannot judge stays so."""
    values = judge.RewardModel(str(folder))(items()[:2])
    with judge.opened(rewards.RewardConfig(model=str(folder))) as scorer:
        found = scorer.submit(items()[:3]).result()
    np.testing.assert_allclose([one.value for one in found[:2]], values, rtol=1e-5)
    assert (found[2].failure, math.isnan(found[2].value)) == ("reward_model", True)

    def right(completion, example):
        return None if completion == "bcd" else 1.0

    with rewards.Scorer(right) as functions:
        both = judge.Judge(functions, judge.RewardModel(str(folder)), 0.5)
        found = both.submit(items()[:2]).result()
    np.testing.assert_allclose(found[0].value, 1.0 + 0.5 / (1 + np.exp(-values[0])), rtol=1e-5)
    assert (found[1].failure, math.isnan(found[1].value)) == ("none", True)
    assert found[0].parts["reward_model"] == pytest.approx(values[0], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "reward needs reward.function, or reward.model"),
        ({"function": "a:b", "model_weight": 0.5}, "model_weight is for reward.model"),
        ({"function": "a:b", "model": "x"}, "a wrong answer that people like"),
        ({"model": "x", "parts": (rewards.Part("a:b"),)}, "name that first"),
    ],
)
def test_contradictions_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        rewards.RewardConfig(**changes)
