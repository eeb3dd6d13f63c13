"""A reward model as what judges completions in RL, alone and beside a verifier."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import hub, rewards
from jaxpost.data import tokenizers
from jaxpost.models import heads
from jaxpost.recipes import judge, scoring

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
def start():
    """A model and its parameters, with a byte tokenizer."""
    tokenizer = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
    hf_config = {**TINY, "vocab_size": tokenizer.vocab_size}
    return hub.init_model(hf_config, jax.random.key(0), files=tokenizer.files)


@pytest.fixture(scope="module")
def folder(start, tmp_path_factory):
    """A reward model."""
    path = tmp_path_factory.mktemp("judge") / "model"
    hub.save_reward_model(path, *start, {"weight": jax.random.normal(jax.random.key(1), (16,))})
    return path


@pytest.fixture(scope="module")
def steps_folder(start, tmp_path_factory):
    """A process reward model whose steps end with a semicolon."""
    path = tmp_path_factory.mktemp("judge") / "steps"
    head = {"weight": jax.random.normal(jax.random.key(1), (16,)), "bias": jnp.float32(0.25)}
    hub.save_process_reward_model(path, *start, head, step_separator=";")
    return path


def items() -> list[rewards.Item]:
    said = [("one:", "two"), ("a", "bcd"), ("long", "x" * 100), ("say", "")]
    return [rewards.Item(prompt, completion, {}) for prompt, completion in said]


def test_the_reward_is_read_after_the_last_token(folder):
    """Each conversation in a row of its own gives the same number; one has no room."""
    scored = scoring.RewardModel(str(folder))
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
    values = scoring.RewardModel(str(folder))(items()[:2])
    with judge.opened(rewards.RewardConfig(model=str(folder))) as scorer:
        found = scorer.submit(items()[:3]).result()
    np.testing.assert_allclose([one.value for one in found[:2]], values, rtol=1e-5)
    assert (found[2].failure, math.isnan(found[2].value)) == ("reward_model", True)

    def right(completion, example):
        return None if completion == "bcd" else 1.0

    with rewards.Scorer(right) as functions:
        both = judge.Judge(functions, scoring.RewardModel(str(folder)), 0.5)
        found = both.submit(items()[:2]).result()
    np.testing.assert_allclose(found[0].value, 1.0 + 0.5 / (1 + np.exp(-values[0])), rtol=1e-5)
    assert (found[1].failure, math.isnan(found[1].value)) == ("none", True)
    assert found[0].parts["reward_model"] == pytest.approx(values[0], rel=1e-5)


@pytest.mark.parametrize(
    ("how", "score"),
    [("min", 0.354344), ("product", 0.142432), ("last", 0.354344), ("mean", 0.545079)],
)
def test_one_score_of_the_steps_by_hand(how, score):
    """Of the logits 1, 0.2 and -0.6."""
    right = scoring.sigmoid(np.array([1.0, 0.2, -0.6]))
    assert scoring.OF_STEPS[how](right) == pytest.approx(score, abs=1e-6)


def test_a_process_reward_model_reads_each_step_where_it_ends(steps_folder, start):
    """Each completion in a row of its own gives the same; blank steps are none."""
    said = {"1+1=2;2+1=3": ["1+1=2;", "2+1=3;"], ";a; ;b;": ["a;", "b;"], "c": ["c;"]}
    scored = scoring.ProcessRewardModel(str(steps_folder), "min")
    found = scored.of_steps([rewards.Item("say:", text, {}) for text in said])
    model, params, head = hub.load_process_reward_model(steps_folder)
    tokenizer = tokenizers.load_tokenizer(steps_folder)
    for parts, right in zip(said.values(), found, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode("say:" + "".join(parts))]
        tokens = jnp.asarray(ids)[None]
        hidden = model.apply(params, tokens, None, None, None)
        ends = np.cumsum([len(part) for part in parts]) + 4
        expected = jax.nn.sigmoid(heads.read(head, hidden)[0, ends])
        np.testing.assert_allclose(right, expected, rtol=1e-4)


def test_a_process_reward_model_alone_and_beside_a_verifier(steps_folder):
    """Its score is one already between 0 and 1; nothing said has the lowest, 0."""
    asked = [rewards.Item("say:", said, {}) for said in ("a;b", "", " ; ", "x" * 100)]
    right = scoring.ProcessRewardModel(str(steps_folder), "min").of_steps(asked[:1])[0]
    for how, score in (("product", np.prod(right)), (None, np.min(right))):
        config = rewards.RewardConfig(model=str(steps_folder), steps=how, model_weight=0.5)
        with judge.opened(config) as scorer:
            found = scorer.submit(asked).result()
        np.testing.assert_allclose([one.value for one in found[:3]], [score / 2, 0, 0], rtol=1e-5)
        assert (found[3].failure, math.isnan(found[3].value)) == ("reward_model", True)
    with rewards.Scorer(lambda completion, example: 1.0) as functions:
        both = judge.Judge(functions, scoring.ProcessRewardModel(str(steps_folder), "last"), 0.5)
        (one,) = both.submit(asked[:1]).result()
    np.testing.assert_allclose(one.value, 1.0 + 0.5 * right[-1], rtol=1e-5)


def test_steps_are_for_process_reward_models(folder):
    config = rewards.RewardConfig(model=str(folder), steps="mean")
    with pytest.raises(ValueError, match=r"reward\.steps is mean"), judge.opened(config):
        pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"function": "a:b", "steps": "min"}, "reward.steps is for a process reward model"),
        ({}, "reward needs reward.function, or reward.model"),
        ({"function": "a:b", "model_weight": 0.5}, "model_weight is for reward.model"),
        ({"function": "a:b", "model": "x"}, "a wrong answer that people like"),
        ({"model": "x", "parts": (rewards.Part("a:b"),)}, "name that first"),
    ],
)
def test_contradictions_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        rewards.RewardConfig(**changes)
