"""The first update of each RL recipe, against a computation in NumPy and float64 of all of it.

The other side begins at token ids and rewards: it has its own transformer, advantages and losses,
and its gradient is one of central differences over every parameter.
"""

import dataclasses
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import hub, losses, rewards, rollout, train_step
from jaxpost.data import prompts
from jaxpost.recipes import (
    accuracy,
    dynamic,
    experience,
    gains,
    grpo,
    pmd,
    ppo,
    setup,
    support,
    told,
)

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.4,
}
PROMPTS = ([3, 1, 4], [2, 7])
COMPLETIONS = [[5, 9], [2, 6, 5, 10], [3], [8, 10, 1], [4, 4], [10], [7, 2, 9, 1, 10], [1, 6]]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, np.nan, 0.0, 0.25]  # four a prompt; one could not be judged
TEMPERATURE = 0.8
SAMPLER = np.random.default_rng(7).uniform(-5.0, -1.0, (8, 5)).astype(np.float32)
STALENESS = np.zeros((8, 5), int)  # of each token; what follows a completion's end is not looked at
STALENESS[1, :2] = STALENESS[3, 0] = STALENESS[7] = 2


@pytest.fixture(scope="module")
def model():
    return hub.init_model(SMALL, jax.random.key(0), dtype="float32")


def moved(params, size=0.05, seed=1):
    """Other parameters near these."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return tree.unflatten([x + size * rng.normal(size=x.shape).astype(np.float32) for x in leaves])


def found(cut=()) -> experience.Experience:
    """Completions that stopped, but for those that were `cut`."""
    width = max(map(len, COMPLETIONS))
    tokens, mask = np.zeros((8, width), np.int32), np.zeros((8, width), bool)
    for row, ids in enumerate(COMPLETIONS):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    reasons = np.where(np.isin(np.arange(8), cut), rollout.LENGTH, rollout.STOP)
    drawn = rollout.Rollout(tokens, np.where(mask, SAMPLER, 0), mask, mask.sum(1), reasons)
    return experience.Experience(
        [prompts.Prompt(np.array(ids, np.int32), "", {}, n, "") for n, ids in enumerate(PROMPTS)],
        drawn,
        [""] * 8,
        [rewards.Scored(value, {}, "", None) for value in REWARDS],
        STALENESS,
    )


def settings(recipe, **changes):
    return recipe.Config(
        run="",
        model=setup.ModelConfig(fresh=SMALL, tokenizer="bytes"),
        data=prompts.PromptConfig(train="none"),
        reward=rewards.RewardConfig("none:none"),
        rollout=experience.RolloutConfig(
            prompts=2,
            completions=4,
            max_new_tokens=6,
            temperature=TEMPERATURE,
        ),
        **changes,
    )


def policy_of(model):
    return setup.Policy(model[0], model[1], types.SimpleNamespace(), None)


# The other side --------------------------------------------------------------------------------


def normed(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def turned(x):
    """Rotary embedding of [T, heads, 4]."""
    angles = np.arange(len(x))[:, None] / 10_000.0 ** (np.arange(2) / 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate(
        [x[..., :2] * cos - x[..., 2:] * sin, x[..., 2:] * cos + x[..., :2] * sin], -1
    )


def hidden_of(p, ids):
    """One sequence [T] → [T, 8]: a Llama of two layers."""
    x = p["embedding"][ids]
    for layer in range(2):
        w = {name: next(iter(leaf.values()))[layer] for name, leaf in p["layers"].items()}
        y = normed(x, w["attn_norm"])
        q, k, v = (y @ w[name] for name in ("q_proj", "k_proj", "v_proj"))
        q, k = turned(q.reshape(-1, 2, 4)), turned(k.reshape(-1, 1, 4))
        scores = np.einsum("thd,sd->hts", q, k[:, 0]) / 2.0
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sd->thd", weights, v).reshape(-1, 8) @ w["o_proj"]
        y = normed(x, w["mlp_norm"])
        gate = y @ w["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up_proj"])) @ w["down_proj"]
    return normed(x, p["final_norm"]["scale"])


def sequences():
    for number, completion in enumerate(COMPLETIONS):
        prompt = PROMPTS[number // 4]
        yield np.array([*prompt, *completion]), len(prompt) - 1


def logps_of(p) -> list[np.ndarray]:
    """log π of each completion's tokens."""
    out = []
    for ids, start in sequences():
        logits = hidden_of(p, ids[:-1]) @ p["embedding"].T / TEMPERATURE
        logits -= logits.max(-1, keepdims=True)
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        out.append(logps[np.arange(len(ids) - 1), ids[1:]][start:])
    return out


def values_of(trunk, head) -> list[np.ndarray]:
    return [
        hidden_of(trunk, ids[:-1])[start:] @ head["weight"] + head["bias"]
        for ids, start in sequences()
    ]


def doubles(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def gradient_norm(loss, params, step=1e-5) -> float:
    """Of a function of a tree, by central differences in every coordinate."""
    total = 0.0
    for leaf in jax.tree.leaves(params):
        flat = leaf.reshape(-1)
        for place in range(flat.size):
            before = flat[place]
            flat[place] = before + step
            above = loss(params)
            flat[place] = before - step
            below = loss(params)
            flat[place] = before
            total += ((above - below) / (2 * step)) ** 2
    return total**0.5


def grouped(normalize: bool) -> np.ndarray:
    """Each reward less the mean of its group's, over their deviation; 0 where there is none."""
    out = []
    for group in np.array(REWARDS).reshape(2, 4):
        there = group[~np.isnan(group)]
        scale = np.std(there, ddof=1) + 1e-6 if normalize else 1.0
        out += [0.0 if np.isnan(r) else (r - there.mean()) / scale for r in group]
    return np.array(out)


def surrogate(new, old, advantage):
    ratio = np.exp(new - old)
    return -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)


def importances(old, kind) -> list:
    """π_old / π_sampler of each token: as it is, at most 2, or 0 outside [½, 2]."""
    w = [np.exp(new - SAMPLER[row, : len(new)]) for row, new in enumerate(old)]
    every = np.concatenate(w)
    assert min((every < 0.5).sum(), (every > 2).sum(), ((every > 0.5) & (every < 2)).sum()) > 2
    if kind == "truncated":
        return [np.minimum(each, 2.0) for each in w]
    if kind == "banded":
        return [np.where((each >= 0.5) & (each <= 2), each, 0.0) for each in w]
    return [np.ones_like(each) for each in w]


JUDGED = [number for number, reward in enumerate(REWARDS) if not np.isnan(reward)]


def one_update(recipe_update, state, batch):
    _, measured = recipe_update(state, batch)
    return float(measured["loss"]), float(measured["grad_norm"])


# The recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("microbatches", "laid_out", "importance"),
    [
        (1, False, "none"),
        (4, False, "truncated"),
        (1, True, "banded"),
        (4, True, "none"),
        (4, True, "truncated"),
    ],
)
def test_grpo(model, microbatches, laid_out, importance):
    policy, rows = policy_of(model), experience.rows_of(found())
    config = settings(
        grpo, epochs=2, kl_coef=0.04, microbatches=microbatches, importance=importance
    )
    now, reference = moved(model[1]), moved(model[1], seed=2)
    score = experience.make_scores(policy.model, config.rollout, 2)
    gained, ref = gains.in_groups(config, found(), rows), score(reference, rows)
    batch = grpo.make_batch(rows, gained, score(model[1], rows), {"ref_logps": ref})
    if laid_out:
        batch = next(experience.passes(batch, config, jax.random.key(0), policy.model))
    optimizer = optax.sgd(0.1)
    state = train_step.init_state(now, optimizer)
    loss, norm = one_update(grpo.make_update(config, policy, optimizer), state, batch)

    old, ref, advantages = logps_of(doubles(model[1])), logps_of(doubles(reference)), grouped(True)
    factors = importances(old, importance)

    def expected(p):
        new, out = logps_of(p), []
        for row in JUDGED:
            k1 = new[row] - ref[row]
            terms = surrogate(new[row], old[row], advantages[row])
            terms = terms + 0.04 * (np.exp(-k1) - 1 + k1)
            out.append(np.mean(factors[row] * terms))
        return np.mean(out)

    at = doubles(moved(model[1]))
    np.testing.assert_allclose(loss, expected(at), atol=1e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=1e-4)


def test_what_is_too_stale_is_read_and_not_trained(model):
    """GRPO on policy; a completion of stale tokens alone is none of the sequences of the mean."""
    policy, rows = policy_of(model), experience.rows_of(found(), stale_after=1)
    config = settings(grpo)
    optimizer = optax.sgd(0.1)
    batch = grpo.make_batch(rows, gains.in_groups(config, found(), rows), rows.sampler_logps)
    state = train_step.init_state(jax.tree.map(jnp.array, model[1]), optimizer)
    loss, norm = one_update(grpo.make_update(config, policy, optimizer), state, batch)
    start, advantages = logps_of(doubles(model[1])), grouped(True)

    def expected(p):
        new, out = logps_of(p), []
        for row in JUDGED:
            fresh = STALENESS[row, : len(new[row])] <= 1
            if fresh.any():
                out.append(np.mean(-np.exp(new[row] - start[row])[fresh] * advantages[row]))
        return np.mean(out)

    np.testing.assert_allclose(loss, expected(doubles(model[1])), atol=1e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, doubles(model[1])), rtol=1e-4)


@pytest.mark.parametrize(
    ("loss", "stale_after"),
    [("pmd", None), ("mirror_descent", None), ("pmd", 0), ("pmd_token", None), ("pmd_token", 0)],
)
def test_pmd(model, loss, stale_after):
    policy, rows = policy_of(model), experience.rows_of(found(), stale_after)
    window = {"log_low": -0.05, "log_high": 0.02} if loss == "pmd_token" else {}
    config = settings(pmd, loss=loss, tau=0.3, minibatches=1, microbatches=2, **window)
    score = experience.make_scores(policy.model, config.rollout, 2)
    batch = pmd.make_batch(config, 1, found(), rows, score(model[1], rows))
    batch = next(experience.passes(batch, config, jax.random.key(0), policy.model))
    optimizer = optax.sgd(0.1)
    state = train_step.init_state(moved(model[1]), optimizer)
    ours, norm = one_update(pmd.make_update(config, policy, optimizer), state, batch)

    old, advantages, tau = logps_of(doubles(model[1])), grouped(False), 0.3

    def expected(p):
        new, out = logps_of(p), []
        for row in JUDGED:
            by_token = new[row] - old[row]
            if stale_after is not None:
                by_token = by_token[STALENESS[row, : len(by_token)] <= stale_after]
            if not by_token.size:
                continue
            moved_by = np.sum(by_token)
            if loss == "pmd_token":
                inside = (by_token >= -0.05) & (by_token <= 0.02)
                gains = np.where(inside, np.exp(by_token) * advantages[row], 0.0)
                out.extend(tau * by_token**2 - gains)
            elif loss == "pmd":
                out.append((advantages[row] - tau * moved_by) ** 2 / (2 * tau))
            else:
                ratio = np.exp(moved_by)
                penalty = tau * (ratio * moved_by - ratio + 1)
                out.append(penalty - ratio * advantages[row])
        return np.mean(out)

    at = doubles(moved(model[1]))
    np.testing.assert_allclose(ours, expected(at), atol=1e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=1e-4)


def gae(rewards_, values, gamma, lam):
    out, later, after = [], 0.0, 0.0
    for reward, value in zip(rewards_[::-1], values[::-1], strict=True):
        later = reward + gamma * after - value + gamma * lam * later
        after = value
        out.append(later)
    return np.array(out[::-1])


PPO = {  # beside kl_coef, value_coef, gamma and lam
    "separate": {"importance": "banded"},
    "shared": {"critic": "shared", "importance": "truncated"},
    "everything": {
        **{"dual_clip": 1.02, "stop_penalty": -1.0, "whiten_rewards": True},
        **{"value_loss": "squared"},
    },
}
CUT = (2, 5, 6)  # completions that were too long, of which one could not be judged


@pytest.mark.parametrize("name", PPO)
def test_ppo(model, name):
    """ "everything" has stale tokens too: in the advantages of others, and untrained themselves."""
    policy, stale_after = policy_of(model), 1 if name == "everything" else None
    rows = experience.rows_of(found(CUT), stale_after)
    config = settings(
        ppo, kl_coef=0.1, value_coef=0.5, gamma=0.9, lam=0.8, microbatches=2, **PPO[name]
    )
    params, trainable = ppo.with_critic(config, policy)
    before, now = moved(params, 0.1, seed=3), moved(moved(params, 0.1, seed=3))
    reference = moved(model[1], seed=2)
    score = experience.make_scores(policy.model, config.rollout, 2)
    old = score(before["policy"], rows)
    kl = old - score(reference, rows)
    values = ppo.make_values(config, policy)(before, rows)
    scores = ppo.rewards_of(config, found(CUT))
    batch = ppo.make_batch(config, scores, rows, old, values, kl, 0.1)
    batch = next(experience.passes(batch, config, jax.random.key(0), policy.model))
    optimizer = optax.sgd(0.1)
    state = train_step.init_state(now, optimizer)
    update = ppo.make_update(config, policy, optimizer, trainable)
    at = doubles(now)
    ours, norm = one_update(update, state, batch)

    then = doubles(before)
    old, ref = logps_of(then["policy"]), logps_of(doubles(reference))
    factors = importances(old, config.importance)

    def values_at(p):
        trunk = p["policy"] if config.critic == "shared" else p["critic"]["trunk"]
        return values_of(trunk, p["critic"]["head"])

    fresh = {row: STALENESS[row, : len(old[row])] <= (stale_after or 9) for row in JUDGED}
    old_values, paid = values_at(then), {}
    for row in JUDGED:
        paid[row] = -0.1 * (old[row] - ref[row])
        penalty = config.stop_penalty is not None and row in CUT
        paid[row][-1] += -1.0 if penalty else REWARDS[row]
    if config.whiten_rewards:
        every = np.concatenate(list(paid.values()))
        scale = np.sqrt(every.var() + 1e-8)
        paid = {row: (r - every.mean()) / scale + every.mean() for row, r in paid.items()}
    gains = {row: gae(paid[row], old_values[row], 0.9, 0.8) for row in JUDGED}
    returns = {row: gains[row] + old_values[row] for row in JUDGED}
    together = np.concatenate([gains[row][fresh[row]] for row in JUDGED])
    white = {
        row: (g - together.mean()) / np.sqrt(together.var() + 1e-8) for row, g in gains.items()
    }

    def expected(p):
        new, values, out = logps_of(p["policy"]), values_at(p), []
        for row in JUDGED:
            near = old_values[row] + np.clip(values[row] - old_values[row], -0.2, 0.2)
            worse = (values[row] - returns[row]) ** 2
            if config.value_loss == "clip":
                worse = np.maximum(worse, (near - returns[row]) ** 2)
            of_policy = surrogate(new[row], old[row], white[row])
            if config.dual_clip is not None:
                most = np.where(white[row] < 0, -config.dual_clip * white[row], np.inf)
                of_policy = np.minimum(of_policy, most)
            out.append((factors[row] * of_policy + 0.5 * 0.5 * worse)[fresh[row]])
        return np.mean(np.concatenate(out))

    np.testing.assert_allclose(ours, expected(at), atol=2e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=2e-4)


def test_sequence_level_ppo(model):
    """The critic's logit at the prompt's end; BCE a completion, the clipped loss a token."""
    policy, rows = policy_of(model), experience.rows_of(found())
    config = settings(ppo, critic="prompt", value_coef=0.5)
    params, trainable = ppo.with_critic(config, policy)
    before, now = moved(params, 0.1, seed=3), moved(moved(params, 0.1, seed=3))
    old = experience.make_scores(policy.model, config.rollout, 2)(before["policy"], rows)
    values = ppo.make_values(config, policy)(before, rows)
    scores = ppo.rewards_of(config, found())
    batch = ppo.make_batch(config, scores, rows, old, values, jnp.zeros_like(old), 0.0)
    logged = ppo.of_rollout(config, batch, scores, jnp.zeros_like(old), 0.0)
    at, then = doubles(now), doubles(before)
    optimizer = optax.sgd(0.1)
    update = ppo.make_update(config, policy, optimizer, trainable)
    ours, norm = one_update(update, train_step.init_state(now, optimizer), batch)

    def logits_at(p):
        return [each[0] for each in values_of(p["critic"]["trunk"], p["critic"]["head"])]

    old, before = logps_of(then["policy"]), 1 / (1 + np.exp(-np.array(logits_at(then))))

    def expected(p):
        new, logits, of_tokens, of_rows = logps_of(p["policy"]), logits_at(p), [], []
        for row in JUDGED:
            of_tokens.append(surrogate(new[row], old[row], REWARDS[row] - before[row]))
            chance = 1 / (1 + np.exp(-logits[row]))
            right, wrong = REWARDS[row] * np.log(chance), (1 - REWARDS[row]) * np.log(1 - chance)
            of_rows.append(-right - wrong)
        return np.mean(np.concatenate(of_tokens)) + 0.5 * np.mean(of_rows)

    np.testing.assert_allclose(ours, expected(at), atol=2e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=2e-4)
    sizes = np.array([len(COMPLETIONS[row]) for row in JUDGED])
    np.testing.assert_allclose(
        logged["values/mean"], np.average(before[JUDGED], weights=sizes), rtol=1e-5
    )
    told = np.repeat(np.array(REWARDS)[JUDGED], sizes)
    errors = told - np.repeat(before[JUDGED], sizes)
    explained = 1 - errors.var() / told.var()
    np.testing.assert_allclose(logged["values/explained_variance"], explained, rtol=1e-5)


def test_what_ppo_says_of_a_rollout(model):
    """Means over completions: the score, the KL and surprise summed over tokens."""
    policy, rows = policy_of(model), experience.rows_of(found(CUT))
    config = settings(ppo, kl_coef=0.1, stop_penalty=-1.0)
    old = experience.make_scores(policy.model, config.rollout, 2)(model[1], rows)
    ref = experience.make_scores(policy.model, config.rollout, 2)(moved(model[1]), rows)
    values, scores = jnp.zeros_like(old), ppo.rewards_of(config, found(CUT))
    batch = ppo.make_batch(config, scores, rows, old, values, old - ref, 0.1)
    logged = ppo.of_rollout(config, batch, scores, old - ref, 0.1)
    mine, theirs = logps_of(doubles(model[1])), logps_of(doubles(moved(model[1])))
    kl = np.mean([np.sum(mine[row] - theirs[row]) for row in JUDGED])
    score = np.mean([-1.0 if row in CUT else REWARDS[row] for row in JUDGED])
    expected = {
        "objective/kl": kl,
        "objective/scores": score,
        "objective/non_score_reward": -0.1 * kl,
        "objective/rlhf_reward": score - 0.1 * kl,
        "objective/entropy": np.mean([-np.sum(mine[row]) for row in JUDGED]),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(logged[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def losses_of_minibatches(update, state, batch, config, model):
    parts = experience.passes(batch, config, jax.random.key(0), model)
    return sorted(float(update(jax.tree.map(jnp.copy, state), part)[1]["loss"]) for part in parts)


def test_each_minibatch_is_a_mean_of_its_own(model):
    """A pass of two minibatches is one prompt's completions, and then the other's."""
    policy, rows, optimizer = policy_of(model), experience.rows_of(found()), optax.sgd(0.1)
    now = moved(model[1])
    config = settings(pmd, tau=0.3, minibatches=2)
    old = experience.make_scores(policy.model, config.rollout, 2)(model[1], rows)
    batch = pmd.make_batch(config, 1, found(), rows, old)
    state = train_step.init_state(now, optimizer)
    update = pmd.make_update(config, policy, optimizer)
    ours = losses_of_minibatches(update, state, batch, config, policy.model)
    new, before, gains = logps_of(doubles(now)), logps_of(doubles(model[1])), grouped(False)
    by_row = {row: (gains[row] - 0.3 * np.sum(new[row] - before[row])) ** 2 / 0.6 for row in JUDGED}
    expected = [np.mean([by_row[row] for row in JUDGED if row // 4 == p]) for p in (0, 1)]
    np.testing.assert_allclose(ours, sorted(expected), rtol=1e-4)

    config = settings(ppo, epochs=1, minibatches=2, value_coef=1e-9)
    params, trainable = ppo.with_critic(config, policy)
    batch = ppo.make_batch(
        config, ppo.rewards_of(config, found()), rows, old, jnp.zeros_like(old), 0 * old, 0.0
    )
    state = train_step.init_state({**params, "policy": now}, optimizer)
    update = ppo.make_update(config, policy, optimizer, trainable)
    ours = losses_of_minibatches(update, state, batch, config, policy.model)
    raw = {
        row: gae([0.0] * (len(new[row]) - 1) + [REWARDS[row]], 0 * new[row], 1, 0.95)
        for row in JUDGED
    }
    every = np.concatenate(list(raw.values()))
    white = {row: (r - every.mean()) / np.sqrt(every.var() + 1e-8) for row, r in raw.items()}
    by_row = {row: surrogate(new[row], before[row], white[row]) for row in JUDGED}
    expected = [
        np.mean(np.concatenate([by_row[row] for row in JUDGED if row // 4 == p])) for p in (0, 1)
    ]
    np.testing.assert_allclose(ours, sorted(expected), rtol=1e-3, atol=1e-5)


def test_pmd_by_length(model):
    """OpenKimi divides a completion's square by its tokens."""
    policy, rows, optimizer = policy_of(model), experience.rows_of(found()), optax.sgd(0.1)
    config = settings(pmd, tau=0.3, minibatches=1, per_length=True, baseline="leave_one_out")
    old = experience.make_scores(policy.model, config.rollout, 2)(model[1], rows)
    batch = pmd.make_batch(config, 1, found(), rows, old)
    state = train_step.init_state(moved(model[1]), optimizer)
    ours, _ = one_update(pmd.make_update(config, policy, optimizer), state, batch)
    new, before = logps_of(doubles(moved(model[1]))), logps_of(doubles(model[1]))
    gains = grouped(False) * np.repeat([4 / 3, 3 / 2], 4)  # n / (n - 1), of four and of three
    by_row = [
        (gains[row] - 0.3 * np.sum(new[row] - before[row])) ** 2 / 0.6 / len(new[row])
        for row in JUDGED
    ]
    np.testing.assert_allclose(ours, np.mean(by_row), rtol=1e-4)


# Rewards to advantages -------------------------------------------------------------------------


def test_the_length_reward_counts_after_its_warm_up_and_among_what_was_judged():
    """Lengths 2 4 1 3 | 2 1 5 2, of which the 1 was not judged; right are those of reward 1."""
    config = settings(pmd, length_weight=0.6, length_after=2)
    np.testing.assert_allclose(
        pmd.centred_rewards(config, 2, found()).ravel(), grouped(False), atol=1e-6
    )
    lam = np.array([[1 / 6, -0.5, 0.0, -1 / 6], [0.5, 0.0, -0.5, 0.0]])  # wrong ones at most 0
    shaped = np.array(REWARDS).reshape(2, 4) + 0.6 * lam
    expected = np.where(np.isnan(shaped), 0, shaped - np.nanmean(shaped, axis=1, keepdims=True))
    np.testing.assert_allclose(pmd.centred_rewards(config, 3, found()), expected, atol=1e-6)


def per_row(rows, values):
    """[B, T] of one number a completion → that number."""
    for row, mask in zip(np.asarray(values), rows.completion_mask, strict=True):
        assert len(set(row[mask].tolist())) == 1
        assert not row[~mask].any()
    return np.asarray(values)[np.arange(8), np.argmax(rows.completion_mask, axis=1)]


def test_a_completion_that_is_nearly_too_long_has_less_reward():
    """Of at most 6 tokens the last 4 cost: lengths 2 4 1 3 | 2 1 5 2."""
    rows = experience.rows_of(found())
    config = settings(grpo, overlong_margin=4, advantage="group_centered")
    gained = gains.in_groups(config, found(), rows)
    shaped = np.array(REWARDS) + np.array([0, -0.5, 0, -0.25, 0, 0, -0.75, 0])
    groups = shaped.reshape(2, 4)
    expected = np.nan_to_num(groups - np.nanmean(groups, axis=1, keepdims=True)).ravel()
    np.testing.assert_allclose(per_row(rows, gained.advantages), expected, atol=1e-6)


def test_masked_truncated_completions_count_in_their_group_and_are_not_trained():
    rows, config = experience.rows_of(found(CUT)), settings(grpo, mask_truncated=True)
    gained = gains.in_groups(config, found(CUT), rows)
    np.testing.assert_allclose(per_row(rows, gained.advantages), grouped(True), rtol=1e-4)
    trained = {row for row in range(8) if np.asarray(gained.trained)[row].any()}
    assert trained == set(JUDGED) - set(CUT)


def test_remax_takes_the_greedy_reward_off_where_there_is_one():
    """Both are shaped; of the second prompt the greedy completion could not be judged."""
    config = settings(grpo, advantage="greedy_baseline", loss="reinforce", overlong_margin=4)
    rows, every = experience.rows_of(found()), found()
    first = [0, 4]  # one completion a prompt, of 2 and 2 tokens: 5 where it is made longer
    greedy = experience.Experience(
        every.prompts,
        rollout.Rollout(*(field[first] for field in every.rollout))._replace(
            lengths=np.array([5, 2])
        ),
        [""] * 2,
        [rewards.Scored(0.5, {}, "", None), rewards.Scored(np.nan, {}, "", "error")],
        STALENESS[first],
    )
    gained = gains.against_greedy(config, found(), greedy, rows)
    shaped = np.array(REWARDS[:4]) + np.array([0, -0.5, 0, -0.25])
    np.testing.assert_allclose(per_row(rows, gained.advantages)[:4], shaped - (0.5 - 0.75))
    assert not np.asarray(gained.trained)[4:].any()
    assert np.array_equal(np.asarray(gained.trained)[:4], rows.completion_mask[:4])


def test_dynamic_sampling_keeps_mixed_groups_and_fills_up_with_others():
    """Right from 0.5 on: group 0 is mixed, group 1 too; shifted, all are right or all are wrong."""
    config = settings(grpo, dynamic_sampling=True)
    config = dataclasses.replace(config, eval=accuracy.EvalConfig(correct=0.5))

    def shifted(by):
        return found()._replace(
            scored=[one._replace(value=one.value + by) for one in found().scored]
        )

    seen = experience.join([shifted(5), found(), shifted(-5), found()])
    assert dynamic.mixed(config, seen) == [2, 3, 6, 7]
    kept, counts = dynamic.kept_of(config, seen)
    np.testing.assert_array_equal(kept.rewards, found().rewards)
    assert counts == {
        **{"dynamic/sampled": 8, "dynamic/equal": 4, "dynamic/left_over": 2, "dynamic/filled": 0}
    }
    kept, counts = dynamic.kept_of(config, seen.groups([0, 3, 4]))
    np.testing.assert_array_equal(kept.rewards[:, 0], [1.0, 6.0])
    assert counts == {
        **{"dynamic/sampled": 3, "dynamic/equal": 2, "dynamic/left_over": 0, "dynamic/filled": 1}
    }
    with pytest.raises(ValueError, match="of 4 prompts none has both"):
        dynamic.kept_of(config, seen.groups([0, 1, 4, 5]))


# What is told ----------------------------------------------------------------------------------


def test_the_summary_of_a_rollout():
    told_of = told.summary(found(CUT))
    expected = {
        "reward": np.nanmean(REWARDS),
        "rewards/missing": 1,
        "completions/mean_length": 20 / 8,
        "completions/max_length": 5,
        "completions/mean_terminated_length": 13 / 5,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4,
        "completions/clipped_ratio": 3 / 8,
        "frac_reward_zero_std": 0,
    }
    for name, value in expected.items():
        assert told_of[name] == pytest.approx(value), name
    one = found()._replace(prompts=[found().prompts[0]] * 8)
    assert not {"frac_reward_zero_std", "reward_std"} & told.summary(one).keys()


def test_the_sampler_against_the_trainer():
    """Differences of tokens of the same policy, ratios of all."""
    rows = experience.rows_of(found())
    old = np.where(rows.completion_mask, -2.0, 0.0)
    fresh, every = [], []
    for row, ids in enumerate(COMPLETIONS):
        for place in range(len(ids)):
            every.append(np.exp(-2.0 - SAMPLER[row, place]))
            if STALENESS[row, place] == 0:
                fresh.append(abs(-2.0 - SAMPLER[row, place]))
    found_of = told.agreement(old, rows)
    name = "sampling/importance_sampling_ratio"
    assert found_of["sampling/sampling_logp_difference/mean"] == pytest.approx(np.mean(fresh))
    assert found_of["sampling/sampling_logp_difference/max"] == pytest.approx(np.max(fresh))
    assert found_of[f"{name}/mean"] == pytest.approx(np.mean(every), rel=1e-5)
    assert found_of[f"{name}/min"] == pytest.approx(np.min(every), rel=1e-5)
    assert found_of[f"{name}/max"] == pytest.approx(np.max(every), rel=1e-5)


def test_records_hold_the_mean_advantage_of_a_completion():
    mask = np.array([[False, True, True, True]])
    assert told.of_completions(np.array([[0.0, 0.9, -0.8, 0.5]]), mask) == pytest.approx([0.2])
    written = told.records(found(CUT), "train", 6, np.arange(8.0))
    assert [one["advantage"] for one in written] == [0, 1, 2, 3, 4, 5]
    assert [one["reward"] for one in written] == [1.0, 0.0, 0.5, 0.0, 1.0, None]
    assert [one["tokens"] for one in written] == [2, 4, 1, 3, 2, 1]
    assert {one["split"] for one in written} == {"train"}
    assert written[2]["stop"] == rollout.REASONS[rollout.LENGTH] != written[1]["stop"]
    assert "advantage" not in told.records(found(), "eval", 1)[0]


def test_tokens_of_no_weight_are_in_the_means_all_the_same(model):
    """`banded` takes tokens out of the loss; entropy and clip fractions are of all."""
    policy, rows = policy_of(model), experience.rows_of(found())
    optimizer, logged = optax.sgd(0.1), []
    for importance in ("none", "banded"):
        config = settings(grpo, epochs=2, importance=importance)
        old = experience.make_scores(policy.model, config.rollout, 2)(model[1], rows)
        batch = grpo.make_batch(rows, gains.in_groups(config, found(), rows), old)
        state = train_step.init_state(moved(model[1]), optimizer)
        _, measured = grpo.make_update(config, policy, optimizer)(state, batch)
        logged.append(grpo.summary([measured]))
    for name in ("entropy", "clip_ratio/region_mean", "approx_kl"):
        assert logged[0][name] == logged[1][name] > 0
    assert logged[0]["policy_loss"] != logged[1]["policy_loss"]


def test_the_clips_are_the_losses_own():
    functions = {
        "ppo_clip": losses.ppo_clip,
        "ppo_dual_clip": losses.ppo_dual_clip,
        "gspo": losses.gspo_token,
        "cispo": losses.cispo,
    }
    for name, function in functions.items():
        keys = inspect.signature(function).parameters
        assert grpo.CLIPS[name] == (keys["clip_low"].default, keys["clip_high"].default), name
    assert functions.keys() == grpo.CLIPS.keys()


def test_what_was_not_judged_has_no_part_in_anything(model):
    """Other tokens in a completion without a reward change neither loss nor gradient."""
    policy, config = policy_of(model), settings(grpo)
    first, second = found(), found()
    second.rollout.tokens[5, 0] = 4
    optimizer = optax.sgd(0.1)
    update = grpo.make_update(config, policy, optimizer)
    results = []
    for each in (first, second):
        rows = experience.rows_of(each)
        gained = gains.in_groups(config, each, rows)
        batch = grpo.make_batch(rows, gained, jnp.zeros(rows.inputs.shape))
        state = train_step.init_state(jax.tree.map(jnp.array, model[1]), optimizer)
        results.append(one_update(update, state, batch))
    assert results[0] == results[1]


def test_a_term_is_nothing_where_a_log_probability_is_infinite():
    """Value and gradient, of a token that the policy or the reference could not draw."""
    here = jnp.array([-1.0, -jnp.inf, -2.0])
    ref = jnp.array([-2.0, -2.0, -jnp.inf])
    found, slope = jax.value_and_grad(lambda new: jnp.sum(support.within(losses.kl_k3, new, ref)))(
        here
    )
    np.testing.assert_allclose(found, np.exp(-1) - 1 + 1, rtol=1e-6)
    np.testing.assert_allclose(slope, [1 - np.exp(-1), 0, 0], rtol=1e-6)
