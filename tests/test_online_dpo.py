"""Preferences judged while training: who is chosen, by whom it was drawn, what the loss is.

The losses are asked through the recipe's own path, with a model whose probabilities are written
down: a table of what follows each token. Runs are those of `test_rl_recipes`.
"""

import dataclasses
import json
import math
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TINY, logged, records, run_apart

from jaxpost import checkpoint, hub, losses, optimizers, rewards, rollout
from jaxpost.data import prompts, tokenizers
from jaxpost.models import mixture, transformer
from jaxpost.models.model import Cache, Model, ModelCard, TransformerConfig
from jaxpost.recipes import (
    accuracy,
    duels,
    experience,
    labels,
    online_dpo,
    pair_losses,
    samplers,
    setup,
)

JUDGES = '''
import os


def small(completion, example):
    """1 if it begins with a lower-case letter."""
    return float(completion[:1].islower() and completion[:1].isascii())


def same(completion, example):
    return 1.0


def better(prompt, completions, example):
    """The one that begins in lower case; some pairs cannot be judged."""
    if example["number"] % 10 == 0:
        raise OSError("no")
    found = [small(text, example) for text in completions]
    return None if found[0] == found[1] else int(found[1] > found[0])


def longer(prompt, completions, example, biased=False):
    """The longer one; or always the one that is shown first."""
    if "die" in completions:
        os._exit(3)
    if "odd" in completions:
        return 7
    first, second = map(len, completions)
    return 0 if biased else None if first == second else int(second > first)


async def slowly(prompt, completions, example):
    return longer(prompt, completions, example)


def one(completion):
    return 1
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts of digits, 40 to train on and 10 held out, and a file of rewards and judges."""
    folder = tmp_path_factory.mktemp("online")
    rows = [{"prompt": f"{number:02}:", "number": number} for number in range(50)]
    for name, part in {"train": rows[:40], "held_out": rows[40:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "judges.py").write_text(JUDGES)
    return folder


def config_of(
    run, data, *, reward="small", judge=None, rate=1e-2, start=None, sampling=None, **more
):
    sampling = {"prompts": 32, "completions": 2, "max_new_tokens": 2} | (sampling or {})
    scored = rewards.RewardConfig(f"{data / 'judges.py'}:{reward}", workers=1)
    compared = rewards.JudgeConfig(f"{data / 'judges.py'}:{judge}", workers=1)
    fresh = setup.ModelConfig(fresh=TINY, tokenizer="bytes")
    return online_dpo.Config(
        run=str(run),
        model=fresh if start is None else setup.ModelConfig(path=str(start)),
        data=prompts.PromptConfig(
            train=str(data / "train.jsonl"), eval=str(data / "held_out.jsonl")
        ),
        reward=scored if judge is None else None,
        judge=None if judge is None else compared,
        rollout=experience.RolloutConfig(**sampling),
        optimizer=optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        **{"checkpoint": checkpoint.CheckpointConfig(every=2), **more},
    )


# The loss, through the recipe's own path --------------------------------------------------------

SIZE, EOS, REST = 8, 3, 7


def table_model() -> Model:
    """log π(b | a) is `params["table"][a, b]`, whatever came before a."""
    shape = TransformerConfig(SIZE, SIZE, 1, 1, 1, 2, 2, 1.0, max_positions=64)

    def init(key):
        table = jax.random.normal(key, (SIZE, SIZE))
        return {"table": jax.nn.log_softmax(table), "head": jnp.eye(SIZE)}

    def apply(params, tokens, segment_ids=None, positions=None, noise=None):
        return params["table"][tokens]

    def init_cache(batch, length, dtype=None):
        return Cache(jnp.zeros((1, batch, 1, length, 1)), jnp.zeros((1, batch, 1, length, 1)))

    def decode(params, tokens, cache, starts):
        return params["table"][tokens], cache

    def unembed(params, hidden):
        return hidden

    card = ModelCard({}, {})
    return Model(shape, card, init, apply, lambda p: p["head"], unembed, init_cache, decode)


def table_of(*paths: tuple[list[int], list[float]]) -> dict:
    """Parameters in which a path of tokens has these log-probabilities; the rest is REST's."""
    table = np.full((SIZE, SIZE), -30.0)
    for tokens, values in paths:
        for before, after, value in zip(tokens, tokens[1:], values, strict=False):
            table[before, after] = value
    left = 1.0 - np.sum(np.exp(table[:, :REST]), axis=1)
    assert (left > 0).all()
    table[:, REST] = np.log(left)
    return {"table": jnp.asarray(table, jnp.float32), "head": jnp.eye(SIZE)}


FIRST, SECOND = [0, 1, 2, EOS], [0, 4, EOS]
POLICY = table_of((FIRST, [-0.5, -1.0, -0.3]), (SECOND, [-1.2, -0.8]))
REFERENCE = table_of((FIRST, [-0.7, -1.1, -0.6]), (SECOND, [-0.9, -0.6]))
RARER = table_of((FIRST, [-0.5, -1.0, -0.3]), (SECOND, [-1.8, -1.2]))
RARER_REFERENCE = table_of((FIRST, [-0.7, -1.1, -0.6]), (SECOND, [-1.5, -1.0]))
SHORT = [0, 1, EOS]
NASH = table_of((SHORT, [-0.8, -1.2]), (SECOND, [-1.0, -0.8]))
NASH_REFERENCE = table_of((SHORT, [-1.0, -1.3]), (SECOND, [-1.0, -0.6]))


def judged(*groups: tuple) -> experience.Experience:
    """Groups of (tokens with the prompt's, reward, whether it stopped); the prompt is token 0."""
    rows = [row for group in groups for row in group]
    drawn = rollout.unstarted(len(rows), 4)
    for row, (tokens, _, stopped) in enumerate(rows):
        count = len(tokens) - 1
        drawn.tokens[row, :count], drawn.mask[row, :count] = tokens[1:], True
        drawn.lengths[row] = count
        drawn.stop_reasons[row] = rollout.STOP if stopped else rollout.LENGTH
    asked = [prompts.Prompt(np.zeros(1, np.int32), "", {}, p, "") for p in range(len(groups))]
    scored = [rewards.Scored(reward, {}, "", None) for _, reward, _ in rows]
    return experience.Experience(asked, drawn, [""] * len(rows), scored, np.zeros((len(rows), 4)))


def settings(groups: int = 1, **changes) -> online_dpo.Config:
    sampling = changes.pop("sampling", {})
    return online_dpo.Config(
        run="",
        model=setup.ModelConfig(fresh={}, tokenizer="bytes"),
        data=prompts.PromptConfig(train="x"),
        rollout=experience.RolloutConfig(
            **{"prompts": groups, "completions": 2, "max_new_tokens": 4, **sampling}
        ),
        **{"reward": rewards.RewardConfig("a:b"), **changes},
    )


def updated(config, found, params, ref_params) -> dict:
    """What the first update of a rollout measures."""
    model = table_model()
    labelled = labels.label(config, found)
    rows = experience.rows_of(labels.taken(found, labelled.numbers))
    ref_logps = experience.make_scores(model, config.whole, config.microbatches)(ref_params, rows)
    batch = online_dpo.make_batch(config, labelled, rows, np.asarray(ref_logps))
    part = next(experience.passes(batch, config, jax.random.key(0), model))
    policy, sgd = types.SimpleNamespace(model=model, trainable=None), optax.sgd(0.0)
    state = online_dpo.train_step.init_state(jax.tree.map(jnp.array, params), sgd)
    return online_dpo.make_update(config, policy, sgd)(state, part)[1]


@pytest.mark.parametrize(
    ("changes", "second", "stopped", "params", "expected"),
    [
        ({}, 0.4, True, (POLICY, REFERENCE), 0.639659),
        ({}, 0.4, False, (POLICY, REFERENCE), 0.639659),
        ({"stop_penalty": 1.0}, 0.4, True, (POLICY, REFERENCE), 0.639659),
        ({"stop_penalty": 1.0}, 0.4, False, (POLICY, REFERENCE), 0.749659),
        ({"loss": "soft"}, 0.2, True, (POLICY, REFERENCE), 0.673762),
        ({"loss": "soft"}, 1.0, True, (POLICY, REFERENCE), (0.639659 + 0.749659) / 2),
        ({"loss": "soft", "win_rates": "hard"}, 0.2, True, (POLICY, REFERENCE), 0.639659),
        ({"loss": "xpo", "optimism": 0.01}, 0.4, True, (RARER, RARER_REFERENCE), 0.609659),
        ({"loss": "xpo"}, 0.4, True, (RARER, RARER_REFERENCE), 0.639629),
        ({"loss": "simpo", "beta": 2.0}, 0.4, True, (POLICY, REFERENCE), 0.798139),
        ({"loss": {"dpo": 0.5, "nll": 1.0}}, 0.4, True, (POLICY, REFERENCE), 0.919830),
    ],
)
def test_worked_losses_of_one_pair(changes, second, stopped, params, expected):
    """Two samples with rewards 1 and `second`; the first may have no end, which costs a penalty."""
    found = judged([(FIRST, 1.0, stopped), (SECOND, second, True)])
    measured = updated(settings(**changes), found, *params)
    np.testing.assert_allclose(measured["loss"], expected, atol=2e-6)


def test_nash_md_trains_the_policys_sample_by_its_win_rate():
    """P = σ(r₁ − r₂) = 0.7; a tie, ½, leaves the KL term alone."""
    gap = math.log(0.7 / 0.3)
    for first, second, expected in (
        (gap, 0.0, 0.372),
        (1.0, 1.0, -0.028),
    ):
        found = judged([(SHORT, first, True), (SECOND, second, True)])
        measured = updated(settings(loss="nash_md"), found, NASH, NASH_REFERENCE)
        np.testing.assert_allclose(measured["loss"], expected, atol=2e-6)


NAN = float("nan")
GROUPS = (
    [(FIRST, 0.0, True), (SECOND, 1.0, True)],  # the second is better
    [(FIRST, NAN, True), (SECOND, 1.0, True)],  # one cannot be judged
    [(FIRST, 1.0, True), (FIRST, 0.0, True)],  # the same completion twice
    [(FIRST, 1.0, True), (SECOND, 1.0, True)],  # tied
)


def test_pairs_that_say_nothing_are_counted_and_in_no_mean():
    """Four pairs, of which one counts: its loss is the update's, at any number of microbatches."""
    found = judged(*GROUPS)
    config = settings(4)
    labelled = labels.label(config, found)
    assert labels.counts(labelled) == {
        "pairs/kept": 1.0,
        "pairs/missing": 1.0,
        "pairs/identical": 1.0,
        "pairs/tied": 1.0,
        "pairs/reward_gap": 1.0,
    }
    assert labels.sides_of(labelled, 2) == [
        *("rejected", "chosen"),
        *["missing"] * 2,
        *["identical"] * 2,
        *["tied"] * 2,
    ]
    for parts in (1, 4):
        config = settings(4, microbatches=parts)
        measured = updated(config, found, POLICY, REFERENCE)
        np.testing.assert_allclose(measured["loss"], 0.749659, atol=2e-6)
        np.testing.assert_allclose(measured["rewards/margins"], -0.11, atol=2e-6)
        np.testing.assert_allclose(measured["pairs"], 1.0)
        assert float(measured["completions"]) == 8


def test_what_has_no_reward_stays_out_of_win_rates():
    config = settings(4, loss="soft", win_rates="hard")
    labelled = labels.label(config, judged(*GROUPS))
    assert labelled.kept.tolist() == [True, False, True, True]
    assert labelled.win_rates.tolist() == [1.0, 0.5, 0.5, 0.5]


def test_the_best_of_several_is_chosen_against_the_worst():
    """Among those that are judged; the penalty of what has no end is in."""
    rows = [(FIRST, 0.3, True), (SECOND, NAN, True), (SHORT, 0.9, False), ([0, 5], -1.0, True)]
    for penalty, numbers in ((0.0, [2, 3]), (1.0, [0, 3]), (3.0, [0, 2])):
        config = settings(stop_penalty=penalty, sampling={"completions": 4})
        labelled = labels.label(config, judged(rows))
        assert labelled.numbers.tolist() == [numbers]
        assert labelled.kept.tolist() == [True]


def test_a_judges_rates_are_its_own():
    """Rewards of a judge are P and 1 − P; a penalty is taken off both sides of that."""
    judge = {"reward": None, "judge": rewards.JudgeConfig("a:b"), "loss": "soft"}
    for first, penalty, chosen, rate in (
        (0.75, 0.0, 0, 0.75),
        (0.0, 0.0, 1, 1.0),
        (1.0, 0.5, 0, 0.75),
        (1.0, 1.5, 1, 0.75),
    ):
        config = settings(stop_penalty=penalty, **judge)
        found = judged([(FIRST, first, False), (SECOND, 1.0 - first, True)])
        labelled = labels.label(config, found)
        assert (labelled.numbers[0, 0], labelled.win_rates[0]) == (chosen, rate)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_dropped_pairs_have_no_rank(name):
    """Losses that sort all pairs of an update see those that count, as if alone."""
    draw = np.random.default_rng(0)
    sides = draw.normal(-10.0, 3.0, (4, 6)).astype(np.float32)
    counted = np.array([True, False, True, True, False, True])
    lengths = np.ones((2, 6))
    config = settings(loss=name)
    whole = pair_losses.Sides(*map(jnp.asarray, (*sides, *lengths)))
    found = pair_losses.pair_loss(config, whole, jnp.asarray(counted))
    alone = {"aot": losses.aot, "aot_unpaired": losses.aot_unpaired}[name](*sides[:, counted])
    np.testing.assert_allclose(np.asarray(found)[counted], alone, rtol=1e-6)


# Samplers ---------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def test_a_mixture_of_two_models_is_the_mixture_of_their_logits():
    """In NumPy from each model's own logits, mixed before top_k."""
    model, params = hub.init_model({**TINY, "vocab_size": 11}, jax.random.key(0))
    own, other = jax.tree.map(lambda p: 3 * p, params), model.init(jax.random.key(1))
    mixed = mixture.mixture(model, {"policy": 1.5, "reference": -0.5})
    both = {"policy": own, "reference": other}
    rules = {"temperature": 0.7, "top_k": 4}
    drawn = rollout.sample(
        mixed, both, [[1, 2, 3]] * 4, jax.random.key(2), max_new_tokens=6, **rules
    )
    tokens = np.concatenate([np.tile([1, 2, 3], (4, 1)), drawn.tokens], axis=1)
    logits = [np.asarray(transformer.logits(model, p, tokens))[:, 2:-1] for p in (own, other)]
    expected = (1.5 * logits[0] - 0.5 * logits[1]) / 0.7
    fourth = np.sort(expected, axis=-1)[..., -4:-3]
    expected = log_softmax(np.where(expected >= fourth, expected, -np.inf))
    wanted = np.take_along_axis(expected, drawn.tokens[:, :, None], axis=-1)[..., 0]
    np.testing.assert_allclose(drawn.logps, wanted, atol=2e-5)
    hidden = mixed.apply(both, tokens)
    by_head = np.asarray(hidden @ mixed.head(both).T)
    np.testing.assert_allclose(by_head, mixed.unembed(both, hidden), atol=2e-4)


def test_a_mixture_keeps_each_models_own_soft_cap():
    """What `unembed` gives is the sum of both models' capped logits; there is no one head."""
    plain, params = hub.init_model({**TINY, "vocab_size": 11}, jax.random.key(0))
    model = transformer.make_model(dataclasses.replace(plain.config, final_softcap=0.5))
    mixed = mixture.mixture(model, {"a": 0.5, "b": 0.5})
    both, tokens = {"a": params, "b": model.init(jax.random.key(1))}, np.array([[1, 2, 3]])
    expected = sum(0.5 * transformer.logits(model, p, tokens) for p in both.values())
    np.testing.assert_allclose(transformer.logits(mixed, both, tokens), expected, atol=1e-5)
    with pytest.raises(ValueError, match="not linear"):
        mixed.head(both)


@pytest.mark.parametrize("name", ["reference", "mixture"])
def test_each_of_a_pair_is_drawn_by_its_sampler(name):
    """Both completions' log-probabilities are NumPy's of the mixture; the draws are as frequent."""
    model = table_model()
    own, other = model.init(jax.random.key(0)), model.init(jax.random.key(1))
    tokenizer = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
    policy = setup.Policy(model, own, tokenizer, None)
    drawn = samplers.make_draw(name, policy, other)
    config = experience.RolloutConfig(prompts=256, completions=2, max_new_tokens=2)
    asked = [prompts.Prompt(np.zeros(1, np.int32), "", {}, p, "") for p in range(256)]
    ids, key = range(512), jax.random.key(3)
    found = dict(drawn(policy, own, asked, key, config, sample_ids=ids, begun=None))
    for number, weight in enumerate(samplers.SAMPLERS[name]):
        logits = weight * np.asarray(own["table"]) + (1 - weight) * np.asarray(other["table"])
        expected = log_softmax(logits)
        tokens = np.array([found[p].tokens[number] for p in range(256)])
        sampled = np.array([found[p].logps[number] for p in range(256)])
        np.testing.assert_allclose(sampled[:, 0], expected[0][tokens[:, 0]], atol=1e-5)
        wanted = 256 * np.exp(expected[0])
        seen = np.bincount(tokens[:, 0], minlength=SIZE)
        assert np.sum((seen - wanted) ** 2 / wanted) < 26.0  # χ² of 7 degrees, p = 0.0005


# Judges of pairs --------------------------------------------------------------------------------


def asked_of(judge: rewards.Duels, *texts: str) -> list[rewards.Scored]:
    return judge.submit([rewards.Item("p", text, {"number": 1}) for text in texts]).result()


def test_a_judge_is_asked_in_both_orders(data):
    """The longer of two wins wherever it stands; who always names the first has named nobody."""
    path = f"{data / 'judges.py'}:longer"
    with rewards.Duels(rewards.JudgeConfig(path, workers=1)) as judge:
        for texts, values in {
            ("a", "bb"): (0, 1),
            ("bb", "a"): (1, 0),
            ("a", "b"): (0.5, 0.5),
        }.items():
            found = asked_of(judge, *texts)
            assert tuple(one.value for one in found) == values
            assert [one.parts["disagreed"] for one in found] == [0.0, 0.0]
        for text, kind in {"odd": "error", "die": "crash"}.items():
            found = asked_of(judge, text, "a")
            assert [one.failure for one in found] == [kind, kind]
            assert all(math.isnan(one.value) for one in found)
        assert [one.value for one in asked_of(judge, "die", "die")] == [0.5, 0.5]  # not asked
    biased = rewards.JudgeConfig(path, options={"biased": True}, workers=1)
    with rewards.Duels(biased) as judge:
        found = asked_of(judge, "a", "bb")
        assert [(one.value, one.parts["disagreed"]) for one in found] == [(0.5, 1.0)] * 2


def test_a_judge_may_be_a_coroutine(data):
    config = rewards.JudgeConfig(f"{data / 'judges.py'}:slowly", workers=1)
    with rewards.Duels(config) as judge:
        assert [one.value for one in asked_of(judge, "a", "bb")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("one", "a judge takes \\(prompt, completions, example\\)"),
        ("langer", "did you mean longer"),
    ],
)
def test_what_is_no_judge_is_refused_before_anything_is_sampled(name, told, data):
    with pytest.raises(rewards.RewardError, match=told):
        rewards.Duels(rewards.JudgeConfig(f"{data / 'judges.py'}:{name}", workers=1))


# Runs -------------------------------------------------------------------------------------------


def test_it_learns_what_the_reward_asks(data, tmp_path):
    """Held-out greedy accuracy from at most 20 % to at least 90 % in 22 rollouts."""
    config = config_of(tmp_path / "run", data, steps=22)
    assert online_dpo.train(config) == 0
    first, last = logged(config.run, "eval/accuracy")
    assert first <= 0.2
    assert last >= 0.9
    assert logged(config.run, "objective/kl")[0] == pytest.approx(0.0, abs=1e-5)
    assert logged(config.run, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    lines = (Path(config.run) / "samples.jsonl").read_text().splitlines()
    sides = {record.get("side") for record in map(json.loads, lines)}
    assert {"chosen", "rejected", "tied"} <= sides


def test_where_every_pair_is_dropped_nothing_is_updated(data, tmp_path):
    config = config_of(tmp_path / "run", data, reward="same", steps=2, minibatches=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=None))
    assert online_dpo.train(config) == 0
    assert logged(config.run, "pairs/skipped_updates") == [2.0, 2.0]
    assert logged(config.run, "pairs/kept") == [0.0, 0.0]
    assert logged(config.run, "loss") == []
    start = setup.load_policy(config.model, jax.random.key(config.seed))
    _, params = hub.load_model(Path(config.run) / "model", dtype="float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(params), dict(start.params)))


def test_a_run_that_was_killed_is_the_run_that_was_not(data, tmp_path):
    """Judged by pairs, drawn by two mixtures a rollout ahead; killed at step 2."""
    changes = {"loss": "soft", "samplers": "mixture", "epochs": 2, "minibatches": 2, "steps": 4}
    runs = {}
    for kind, harms in {"straight": ["none"], "harmed": ["kill:2", "none"]}.items():
        config = config_of(
            tmp_path / kind, data, judge="better", sampling={"staleness": 1}, **changes
        )
        run_apart("online_dpo", config, harms)
        runs[kind] = config.run
    assert records(runs["harmed"]) == records(runs["straight"])
    assert max(logged(runs["straight"], "staleness/max")) == 1
    assert sum(logged(runs["straight"], "rewards/failed/error")) > 0
    assert logged(runs["straight"], "eval/win_rate")[0] == 0.5
    assert logged(runs["straight"], "eval/missing") == [0.0, 1.0]  # 40, once texts differ
    weights = [Path(run) / "model" / "model.safetensors" for run in runs.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward": None}, "exactly one of reward and judge"),
        ({"judge": rewards.JudgeConfig("a:b")}, "exactly one of reward and judge"),
        ({"sampling": {"completions": 1}}, "a pair is two completions"),
        ({"samplers": "mixture", "sampling": {"completions": 4}}, "draws one each"),
        ({"loss": "nash_md", "epochs": 2}, "epochs and minibatches are 1"),
        ({"loss": "nash_md", "sampling": {"staleness": 1}}, "no ratio"),
        ({"loss": "nash_md", "samplers": "mixture"}, "set samplers: opponent"),
        ({"loss": "nash_md", "length_weight": 0.5}, "nash_md has none"),
        ({"loss": "xpo", "samplers": "policy"}, "set samplers: reference"),
        ({"optimism": 0.1}, "optimism is 0.1, which loss: dpo does not look at"),
        ({"win_rates": "hard"}, "win_rates is of rewards, for loss"),
        ({"loss": "soft", "win_rates": "hard", "win_rate_scale": 2.0}, "win_rates: logistic"),
        ({"sampling": {"spare": 1}}, "compared whole"),
        ({"loss": "simpo", "divergence": "forward_kl"}, "has no reference"),
        ({"loss": {}}, "loss is empty"),
        ({"minibatches": 3}, "use one of"),
    ],
)
def test_what_does_nothing_or_does_not_go_together_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        settings(4, **changes)


def test_what_a_judge_does_not_measure_is_refused(data, tmp_path):
    config = config_of(tmp_path / "run", data, judge="better")
    best = dataclasses.replace(accuracy.BEST, keep_best=1)
    for part, told in (
        ({"eval": accuracy.EvalConfig(correct=0.5)}, "eval.correct is of rewards"),
        ({"checkpoint": best}, "which a judge does not measure; use one of eval/win_rate"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(config, **part)
    won = dataclasses.replace(best, metric="eval/win_rate")
    assert dataclasses.replace(config, checkpoint=won).checkpoint.keep_best == 1
    assert set(duels.MEASURES) == {
        f"eval/{n}" for n in ("win_rate", "missing", "mean_length", "clipped_ratio")
    }
