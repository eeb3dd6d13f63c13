"""The GRPO recipe's first updates are those of TRL's GRPOTrainer (`golden/make_grpo.py`).

The same weights, prompts, completions and rewards; TRL's loss and gradient norm are what it logged.
"""

import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import advantages, hub, rewards, rollout, train_step
from jaxpost.data import prompts
from jaxpost.recipes import experience, gains, grpo, setup

FOLDER = pathlib.Path(__file__).parent / "golden" / "grpo"
CASES = json.loads((FOLDER / "cases.json").read_text())
TRL_EPSILON = 1e-4  # what TRL adds to a group's deviation

# TRL's settings in our words. What is left out is the default of both.
OURS = {
    "fixed": {},
    "fixed_pass_fail": {},
    "fixed_kl": {"kl_coef": 0.3},
    "fixed_defaults_kl": {
        **{"kl_coef": 0.3, "kl": "k3_weighted", "aggregation": "token_mean", "clip_high": 0.28},
    },
    "fixed_dr_grpo_kl": {
        **{"kl_coef": 2.0, "aggregation": "fixed_length", "advantage": "group_centered"},
    },
    "fixed_batch_scale": {"advantage": "batch_normalized"},
    "fixed_entropy": {"entropy_coef": 0.05},
    "fixed_minibatches": {"minibatches": 3},
    "fixed_stale": {"epochs": 3},
    "ragged_grpo": {"epochs": 3},
    "ragged_dapo_kl": {
        **{"epochs": 3, "kl_coef": 0.1, "kl": "k3_weighted"},
        **{"aggregation": "token_mean", "clip_high": 0.28},
    },
    "ragged_dr_grpo": {"epochs": 3, "aggregation": "fixed_length", "advantage": "group_centered"},
    "ragged_accumulated": {"kl_coef": 0.1, "aggregation": "token_mean", "microbatches": 3},
    "ragged_gspo": {"epochs": 3, "loss": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "ragged_cispo": {"epochs": 3, "loss": "cispo", "aggregation": "token_mean", "clip_high": 0.3},
    "ragged_sapo": {"epochs": 3, "loss": "sapo"},
}
OTHERWISE_DEFINED = {  # by TRL
    "ragged_dapo_kl": {"kl"},  # weighted by the ratio
    "ragged_accumulated": {"entropy", "kl"},  # means over the parts, of which some are short
}


@functools.cache
def policy() -> setup.Policy:
    model, params = hub.load_model(FOLDER, dtype="float32")
    return setup.Policy(model, params, types.SimpleNamespace(), None)


@functools.cache
def make_scores(config: experience.RolloutConfig):
    return experience.make_scores(policy().model, config, 1)


def config_of(case: str, **changes) -> grpo.Config:
    trl = CASES[case]["trl"]
    if changes.get("advantage") != "group_centered":
        changes["std_epsilon"] = TRL_EPSILON
    return grpo.Config(
        run="",
        model=setup.ModelConfig(path=str(FOLDER)),
        data=prompts.PromptConfig(train="none"),
        reward=rewards.RewardConfig("none:none"),
        rollout=experience.RolloutConfig(
            prompts=len(CASES[case]["prompts"]),
            completions=trl["num_generations"],
            max_new_tokens=trl["max_completion_length"],
            temperature=trl.get("temperature", 1.0),
        ),
        **changes,
    )


def found(case: str) -> experience.Experience:
    completions = CASES[case]["completions"]
    lengths = np.array([len(ids) for ids in completions])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(completions)
    reasons = np.where(lengths < lengths.max(), rollout.STOP, rollout.LENGTH)
    drawn = rollout.Rollout(tokens, np.zeros(mask.shape, np.float32), mask, lengths, reasons)
    return experience.Experience(
        [
            prompts.Prompt(np.array(ids, np.int32), "", {}, number, "")
            for number, ids in enumerate(CASES[case]["prompts"])
        ],
        drawn,
        [""] * len(completions),
        [rewards.Scored(value, {}, "", None) for value in CASES[case]["rewards"]],
        np.zeros(mask.shape, int),
    )


def batch_of(config: grpo.Config, case: str) -> grpo.Batch:
    """What the recipe trains on, of completions that TRL sampled."""
    score = make_scores(config.rollout)
    params, rows = policy().params, experience.rows_of(found(case))
    old, of_terms = score(params, rows), {}
    if config.kl_coef:
        of_terms["ref_logps"] = score(jax.tree.map(lambda p: 0.875 * p, params), rows)
    if config.entropy_coef:
        of_terms["entropy_weights"] = grpo.entropy_weights(rows, config.entropy_coef)
    gained = gains.in_groups(config, found(case), rows)
    return grpo.make_batch(rows, gained, old, of_terms)


def assert_same_updates(config: grpo.Config, case: str, batch: grpo.Batch) -> None:
    optimizer = optax.sgd(CASES[case]["trl"]["learning_rate"])
    update = grpo.make_update(config, policy(), optimizer)
    state = train_step.init_state(jax.tree.map(jnp.array, policy().params), optimizer)
    for theirs in CASES[case]["updates"]:
        part = jax.tree.map(lambda x, rows=theirs["rows"]: x[np.array(rows)], batch)
        _, part = experience.laid_out(part, config.microbatches, policy().model)
        state, measured = update(state, part)
        ours = grpo.summary([measured])
        np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-4)
        skipped = {"rows", "loss"} | OTHERWISE_DEFINED.get(case, set())
        for name in theirs.keys() - skipped:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", OURS)
def test_updates(case):
    config = config_of(case, **OURS[case])
    assert len(CASES[case]["updates"]) == config.epochs * config.minibatches
    assert_same_updates(config, case, batch_of(config, case))


@pytest.mark.parametrize("case", CASES)
def test_advantages(case):
    values, scale = jnp.asarray(found(case).rewards), CASES[case]["trl"].get("scale_rewards")
    if scale == "none":
        ours = advantages.group_centered(values)
    elif scale == "batch":
        ours = advantages.batch_normalized(values, epsilon=TRL_EPSILON)
    else:
        ours = advantages.group_normalized(values, epsilon=TRL_EPSILON)
    np.testing.assert_allclose(ours.ravel(), CASES[case]["advantages"], rtol=1e-5, atol=1e-6)
