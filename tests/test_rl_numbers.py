"""The first update of each RL recipe, against a computation in NumPy and float64 of all of it.

The other side begins at token ids and rewards: it has its own transformer, advantages and losses,
and its gradient is one of central differences over every parameter.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import hub, rewards, rollout, train_step
from jaxpost.data import prompts
from jaxpost.recipes import experience, grpo, pmd, ppo, setup

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


def found() -> experience.Experience:
    width = max(map(len, COMPLETIONS))
    tokens, mask = np.zeros((8, width), np.int32), np.zeros((8, width), bool)
    for row, ids in enumerate(COMPLETIONS):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    lengths = mask.sum(1)
    drawn = rollout.Rollout(
        tokens, np.zeros(mask.shape, np.float32), mask, lengths, np.full(8, rollout.STOP)
    )
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


JUDGED = [number for number, reward in enumerate(REWARDS) if not np.isnan(reward)]


def one_update(recipe_update, state, batch):
    _, measured = recipe_update(state, batch)
    return float(measured["loss"]), float(measured["grad_norm"])


# The recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["none", "truncated"])
@pytest.mark.parametrize(
    ("microbatches", "laid_out"), [(1, False), (4, False), (1, True), (4, True)]
)
def test_grpo(model, microbatches, laid_out, importance):
    """The sampler's log-probabilities are 0 here, so that an importance weight is π_old itself."""
    policy, rows = policy_of(model), experience.rows_of(found())
    config = settings(
        grpo, epochs=2, kl_coef=0.04, microbatches=microbatches, importance=importance
    )
    now, reference = moved(model[1]), moved(model[1], seed=2)
    score = experience.make_scores(policy.model, config.rollout, 2)
    gains, ref = grpo.in_groups(config, found(), rows), score(reference, rows)
    batch = grpo.make_batch(config, rows, gains, score(model[1], rows), {"ref_logps": ref})
    if laid_out:
        batch = next(experience.passes(batch, config, jax.random.key(0), policy.model))
    optimizer = optax.sgd(0.1)
    state = train_step.init_state(now, optimizer)
    loss, norm = one_update(grpo.make_update(config, policy, optimizer), state, batch)

    old, ref, advantages = logps_of(doubles(model[1])), logps_of(doubles(reference)), grouped(True)

    def expected(p):
        new, out = logps_of(p), []
        for row in JUDGED:
            k1 = new[row] - ref[row]
            terms = surrogate(new[row], old[row], advantages[row])
            terms = terms + 0.04 * (np.exp(-k1) - 1 + k1)
            weights = np.exp(old[row]) if importance == "truncated" else 1.0
            out.append(np.mean(weights * terms))
        return np.mean(out)

    at = doubles(moved(model[1]))
    np.testing.assert_allclose(loss, expected(at), atol=1e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=1e-4)


def test_what_is_too_stale_is_read_and_not_trained(model):
    """GRPO on policy; a completion of stale tokens alone is none of the sequences of the mean."""
    policy, rows = policy_of(model), experience.rows_of(found(), stale_after=1)
    config = settings(grpo)
    optimizer = optax.sgd(0.1)
    batch = grpo.make_batch(config, rows, grpo.in_groups(config, found(), rows), rows.sampler_logps)
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


@pytest.mark.parametrize(
    ("critic", "importance"), [("separate", "none"), ("separate", "truncated"), ("shared", "none")]
)
def test_ppo(model, critic, importance):
    policy, rows = policy_of(model), experience.rows_of(found())
    config = settings(
        ppo,
        critic=critic,
        importance=importance,
        kl_coef=0.1,
        value_coef=0.5,
        gamma=0.9,
        lam=0.8,
        microbatches=2,
    )
    params, trainable = ppo.with_critic(config, policy)
    before, now = moved(params, 0.1, seed=3), moved(moved(params, 0.1, seed=3))
    reference = moved(model[1], seed=2)
    score = experience.make_scores(policy.model, config.rollout, 2)
    old = score(before["policy"], rows)
    kl = old - score(reference, rows)
    values = ppo.make_values(config, policy)(before, rows)
    scores = ppo.rewards_of(config, found())
    batch = ppo.make_batch(config, scores, rows, old, values, kl, 0.1)
    batch = next(experience.passes(batch, config, jax.random.key(0), policy.model))
    optimizer = optax.sgd(0.1)
    state = train_step.init_state(now, optimizer)
    update = ppo.make_update(config, policy, optimizer, trainable)
    at = doubles(now)
    ours, norm = one_update(update, state, batch)

    then = doubles(before)
    old, ref = logps_of(then["policy"]), logps_of(doubles(reference))

    def values_at(p):
        trunk = p["critic"]["trunk"] if critic == "separate" else p["policy"]
        return values_of(trunk, p["critic"]["head"])

    old_values, gains = values_at(then), {}
    for row in JUDGED:
        paid = -0.1 * (old[row] - ref[row])
        paid[-1] += REWARDS[row]
        gains[row] = gae(paid, old_values[row], 0.9, 0.8)
    returns = {row: gains[row] + old_values[row] for row in JUDGED}
    together = np.concatenate(list(gains.values()))
    white = {
        row: (g - together.mean()) / np.sqrt(together.var() + 1e-8) for row, g in gains.items()
    }

    def expected(p):
        new, values, out = logps_of(p["policy"]), values_at(p), []
        for row in JUDGED:
            near = old_values[row] + np.clip(values[row] - old_values[row], -0.2, 0.2)
            worse = np.maximum((values[row] - returns[row]) ** 2, (near - returns[row]) ** 2)
            weights = np.exp(old[row]) if importance == "truncated" else 1.0
            surrogates = weights * surrogate(new[row], old[row], white[row])
            out.append(surrogates + 0.5 * 0.5 * worse)
        return np.mean(np.concatenate(out))

    np.testing.assert_allclose(ours, expected(at), atol=2e-5)
    np.testing.assert_allclose(norm, gradient_norm(expected, at), rtol=2e-4)


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
        gains = grpo.in_groups(config, each, rows)
        batch = grpo.make_batch(config, rows, gains, jnp.zeros(rows.inputs.shape))
        state = train_step.init_state(jax.tree.map(jnp.array, model[1]), optimizer)
        results.append(one_update(update, state, batch))
    assert results[0] == results[1]
