"""The first update of every preference and reward loss is TRL's: loss, gradient norm, metrics."""

import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import batch, hub, logps, losses, metrics, models
from jaxpost.losses import implicit_rewards, unpaired
from jaxpost.models import heads

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "preference.json").read_text())
PAIRS, SINGLES = CASES["tokens_dpo"], CASES["tokens_kto"]
REFERENCE = 0.875  # times the policy's weights
LABELS, MARGINS = jnp.array(CASES["labels"]), jnp.array(CASES["margins"])
NONE = jnp.zeros(len(MARGINS))


def batch_of(prompts: list, completions: list, *, all_trained: bool = False) -> batch.TokenBatch:
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows])
    first = [0 if all_trained else len(prompt) for prompt in prompts]
    last = [len(row) for row in rows]
    places = np.arange(width)
    mask = (np.array(first)[:, None] <= places) & (places < np.array(last)[:, None])
    return batch.token_batch(tokens, mask)


CHOSEN = batch_of(PAIRS["prompt_ids"], PAIRS["chosen_ids"])
REJECTED = batch_of(PAIRS["prompt_ids"], PAIRS["rejected_ids"])
W, R = (jnp.sum(side.completion_mask, axis=1) for side in (CHOSEN, REJECTED))  # lengths


class Found(NamedTuple):
    """What one set of parameters makes of the rows: log-probabilities [B, T], rewards [B]."""

    chosen: jax.Array
    rejected: jax.Array
    with_prompts: jax.Array
    singles: jax.Array
    mismatched: jax.Array
    aligned_chosen: jax.Array
    aligned_rejected: jax.Array
    rewards_chosen: jax.Array
    rewards_rejected: jax.Array


@functools.cache
def load():
    return hub.load_model(GOLDEN / "grpo", dtype="float32")


def params_of(scale: float):
    scaled = jax.tree.map(lambda p: scale * p, load()[1])
    return {"model": scaled, "head": jnp.array(CASES["head"])}


@jax.jit
def find(params) -> Found:
    model = load()[0]
    score = functools.partial(logps.token_logps, model, params["model"])

    def aligned(rows):
        """log π(y_t) − log Σ_v π(v)²."""
        words = jax.nn.log_softmax(models.logits(model, params["model"], rows.inputs))
        squares = jax.nn.logsumexp(2 * words, axis=-1)
        return jnp.where(rows.completion_mask, score(rows) - squares, 0.0)

    def last_reward(tokens):
        """In the state after each row's last token, which would choose a next one."""
        rows = batch_of(tokens, [[0]] * len(tokens))
        hidden = model.apply(params["model"], rows.inputs, rows.segment_ids, rows.positions)
        rewards = heads.read({"weight": params["head"], "bias": jnp.zeros(())}, hidden)
        return jnp.sum(jnp.where(rows.completion_mask, rewards, 0.0), axis=1)

    return Found(
        score(CHOSEN),
        score(REJECTED),
        score(batch_of(PAIRS["prompt_ids"], PAIRS["chosen_ids"], all_trained=True)),
        score(batch_of(SINGLES["prompt_ids"], SINGLES["completion_ids"])),
        score(batch_of(SINGLES["prompt_ids"], SINGLES["KL_completion_ids"])),
        aligned(CHOSEN),
        aligned(REJECTED),
        last_reward(CASES["tokens_reward"]["chosen_ids"]),
        last_reward(CASES["tokens_reward"]["rejected_ids"]),
    )


@jax.jit
def gradient_norm(params, slopes: Found) -> jax.Array:
    return optax.tree.norm(jax.vjp(find, params)[1](slopes)[0])


@functools.cache
def found(scale: float) -> Found:
    return find(params_of(scale))


def pair(of: Found) -> list[jax.Array]:
    return [jnp.sum(of.chosen, axis=1), jnp.sum(of.rejected, axis=1)]


def referred(loss, *data, **settings):
    """The mean of a loss of pairs with a reference."""
    return lambda x, ref: jnp.mean(loss(*pair(x), *pair(ref), *data, **settings))


def alone(loss, *data, **settings):
    return lambda x, ref: jnp.mean(loss(*pair(x), *data, **settings))


def of_divergence(reward, loss, *data):
    def objective(x, ref):
        rewards = [reward(*sides) for sides in zip(pair(x), pair(ref), strict=True)]
        return jnp.mean(loss(*rewards, NONE, NONE, *data))

    return objective


def of_means(x, ref):
    chosen, rejected = pair(x)
    return jnp.mean(losses.ipo(chosen / W, rejected / R, NONE, NONE))


def nll(x, ref):
    return jnp.sum(losses.nll(x.chosen)) / jnp.sum(W)


def nll_with_prompts(x, ref):
    return jnp.sum(losses.nll(x.with_prompts)) / jnp.sum(x.with_prompts != 0)


def plus(*terms):
    """Σ coefficient · objective."""
    return lambda x, ref: sum(coefficient * term(x, ref) for coefficient, term in terms)


def desensitized(x, ref):
    width = max(CHOSEN.inputs.shape[1], REJECTED.inputs.shape[1])
    wide = [
        np.pad(side.completion_mask, ((0, 0), (0, width - side.inputs.shape[1])))
        for side in (CHOSEN, REJECTED)
    ]
    weigh = functools.partial(implicit_rewards.desensitized_weights, alpha=0.3)
    chosen = weigh(*wide)[:, : CHOSEN.inputs.shape[1]]
    rejected = weigh(*wide[::-1])[:, : REJECTED.inputs.shape[1]]
    sums = (jnp.sum(w * p, 1) for of in (x, ref) for w, p in ((chosen, of[0]), (rejected, of[1])))
    return jnp.mean(losses.dpo(*sums))


def weighted(x, ref):
    aligned = jnp.sum(x.aligned_chosen, axis=1), jnp.sum(x.aligned_rejected, axis=1)
    weights = implicit_rewards.pair_weights(*aligned, W, R)
    return jnp.mean(weights * losses.dpo(*pair(x), *pair(ref)))


def kto_kl(x, ref):
    return unpaired.mismatched_kl(jnp.sum(x.mismatched, axis=1), jnp.sum(ref.mismatched, axis=1))


def kto(of_kl=kto_kl, **settings):
    def objective(x, ref):
        logps, ref_logps = jnp.sum(x.singles, axis=1), jnp.sum(ref.singles, axis=1)
        return jnp.mean(losses.kto(logps, ref_logps, LABELS, of_kl(x, ref), **settings))

    return objective


def of_rewards(loss, **settings):
    return lambda x, ref: jnp.mean(loss(x.rewards_chosen, x.rewards_rejected, **settings))


DPO, BCO = referred(losses.dpo), referred(losses.bco_pair)
ORPO = alone(losses.orpo, W, R)
SMOOTH = {"label_smoothing": 0.1}
ALPHA = functools.partial(implicit_rewards.alpha_divergence, alpha=0.3)
OBJECTIVES = {
    "sigmoid": DPO,
    "sigmoid_beta": referred(losses.dpo, beta=0.5),
    "hinge": referred(losses.hinge),
    "ipo": referred(losses.ipo_average, W, R),
    "exo_pair": referred(losses.exo, **SMOOTH),
    "nca_pair": referred(losses.nca),
    "robust": referred(losses.robust, **SMOOTH),
    "bco_pair": BCO,
    "sppo_hard": referred(losses.sppo_hard),
    "aot": referred(losses.aot, **SMOOTH),
    "aot_unpaired": referred(losses.aot_unpaired, **SMOOTH),
    "apo_zero": referred(losses.apo_zero),
    "apo_down": referred(losses.apo_down),
    "discopop": referred(losses.discopop),
    "sft": nll,
    "sigmoid_norm": referred(losses.dpo_norm, W, R, beta=2.0),
    "forward_kl": of_divergence(implicit_rewards.forward_kl, losses.dpo),
    "js_divergence": of_divergence(implicit_rewards.jensen_shannon, losses.dpo),
    "alpha_divergence": of_divergence(ALPHA, losses.dpo),
    "ipo_js_divergence": of_divergence(implicit_rewards.jensen_shannon, losses.ipo_average, W, R),
    "length_desensitized": desensitized,
    "weighted": weighted,
    "mixed": plus((0.8, DPO), (0.2, BCO), (1, nll)),
    "kto": kto(),
    "kto_swapped": kto(),
    "kto_swapped_weights": kto(beta=0.3, desirable_weight=0.75, undesirable_weight=1.5),
    "apo_zero_unpaired": kto(lambda x, ref: jnp.zeros(())),
    "cpo": plus((1, alone(losses.cpo)), (1, nll)),
    "cpo_alone": alone(losses.cpo, **SMOOTH),
    "cpo_hinge": plus((1, alone(losses.hinge, NONE, NONE)), (1, nll)),
    "cpo_ipo": of_means,
    "simpo": alone(losses.simpo, W, R, beta=2.0, gamma_beta_ratio=0.25),
    "cpo_simpo": plus(
        (1, alone(losses.simpo, W, R, beta=2.0, gamma_beta_ratio=0.5, **SMOOTH)), (1, nll)
    ),
    "alphapo": alone(losses.alphapo, W, R, alpha=0.25, beta=2.5, gamma_beta_ratio=0.1),
    "orpo": plus((1, nll_with_prompts), (0.1, ORPO)),
    "orpo_beta": plus((1, nll_with_prompts), (1, ORPO)),
    "reward": of_rewards(losses.bradley_terry),
    "reward_margin": of_rewards(losses.bradley_terry, margin=MARGINS),
    "reward_centred": plus(
        (1, of_rewards(losses.bradley_terry)), (0.01, of_rewards(losses.reward_centering))
    ),
}


def scales(case: str) -> tuple[float, float]:
    """The policy's and the reference's."""
    return (REFERENCE, 1.0) if "swapped" in case else (1.0, REFERENCE)


def test_every_case_of_trl_is_compared():
    assert set(OBJECTIVES) == {name for name, case in CASES.items() if "trl" in case}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_the_first_update_is_trls(case):
    policy, reference = scales(case)
    loss, slopes = jax.value_and_grad(OBJECTIVES[case])(found(policy), found(reference))
    np.testing.assert_allclose(loss, CASES[case]["loss"], rtol=1e-5)
    norm = gradient_norm(params_of(policy), slopes)
    np.testing.assert_allclose(norm, CASES[case]["grad_norm"], rtol=1e-5)


def test_log_probabilities_and_accuracy_are_trls():
    policy, reference = pair(found(1.0)), pair(found(REFERENCE))
    golden = CASES["sigmoid"]
    np.testing.assert_allclose(jnp.mean(policy[0]), golden["logps/chosen"], rtol=1e-5)
    np.testing.assert_allclose(jnp.mean(policy[1]), golden["logps/rejected"], rtol=1e-5)
    rewards = [p - ref for p, ref in zip(policy, reference, strict=True)]
    assert jnp.mean(metrics.preference_accuracy(*rewards)) == golden["rewards/accuracies"]


@pytest.mark.parametrize("case", ["kto", "kto_swapped"])
def test_the_kl_of_kto_is_trls(case):
    np.testing.assert_allclose(kto_kl(*map(found, scales(case))), CASES[case]["kl"], rtol=1e-5)
