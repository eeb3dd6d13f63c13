"""RL recipes from configuration to exported model, on a model of a few thousand parameters.

Held here: each learns what its reward asks, on prompts that it never trained on; a run that was
killed and resumed is the run that was not; what has no reward is counted and left out.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, records, run_apart

from jaxpost import checkpoint, optimizers, rewards
from jaxpost.data import prompts
from jaxpost.recipes import accuracy, controllers, course, experience, grpo, pmd, ppo, setup

REWARD = '''
def small(completion, example):
    """1 if it begins with a lower-case letter."""
    return float(completion[:1].islower() and completion[:1].isascii())


def hard(completion, example):
    """Some prompts cannot be judged, and some calls fail."""
    if example["number"] % 4 == 0:
        return None
    if example["number"] % 4 == 1:
        raise ValueError("no")
    return small(completion, example)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts of digits, 40 to train on and 10 held out, and a file of rewards."""
    folder = tmp_path_factory.mktemp("rl")
    rows = [{"prompt": f"{number:02}:", "number": number} for number in range(50)]
    for name, part in {"train": rows[:40], "held_out": rows[40:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "judge.py").write_text(REWARD)
    return folder


def config_of(recipe, run, data, *, judge="small", rate=1e-2, completions=8, ahead=None, **changes):
    sampling = {"prompts": 64 // completions, "completions": completions, "max_new_tokens": 2}
    return recipe.Config(
        run=str(run),
        model=setup.ModelConfig(fresh=TINY, tokenizer="bytes"),
        data=prompts.PromptConfig(
            train=str(data / "train.jsonl"), eval=str(data / "held_out.jsonl")
        ),
        reward=rewards.RewardConfig(f"{data / 'judge.py'}:{judge}"),
        rollout=experience.RolloutConfig(**sampling | (ahead or {})),
        optimizer=optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        eval=accuracy.EvalConfig(),
        checkpoint=checkpoint.CheckpointConfig(every=2),
        **changes,
    )


METHODS = {
    "grpo": (grpo, {}),
    "pmd": (pmd, {"tau": 0.1, "minibatches": 2}),
    "ppo": (
        ppo,
        {
            "completions": 1,
            "critic_optimizer": optimizers.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
            "epochs": 2,
        },
    ),
}
VARIANTS = METHODS | {
    "remax": (
        grpo,
        {
            "completions": 1,
            "advantage": "greedy_baseline",
            "aggregation": "sequence_sum_mean",
            "loss": "reinforce",
        },
    ),
}


CORRECTED = {"grpo": {"importance": "truncated"}, "ppo": {"importance": "truncated"}, "pmd": {}}


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        *((name, {}) for name in METHODS),
        ("grpo", {"staleness": 1}),
        *(pytest.param(name, {"staleness": 1}, marks=pytest.mark.slow) for name in ("ppo", "pmd")),
        ("pmd", {"spare": 4, "stale_after": 0}),
        ("remax", {}),
    ],
)
def test_each_method_learns_what_the_reward_asks(name, ahead, data, tmp_path):
    """Held-out greedy accuracy from at most 20 % to at least 90 % in 40 rollouts.

    Also from the tokens of earlier policies, a rollout sampled ahead or begun before.
    """
    recipe, changes = VARIANTS[name]
    corrected = CORRECTED[name] if ahead else {}
    config = config_of(
        recipe, tmp_path / "run", data, steps=40, ahead=ahead, **changes, **corrected
    )
    assert recipe.train(config) == 0
    stale = [r["staleness/max"] for r in records(config.run) if "staleness/max" in r]
    if "staleness" in ahead:
        assert stale == [0, *[1] * 39]
    first, *_, last = [r["eval/accuracy"] for r in records(config.run) if "eval/accuracy" in r]
    assert first <= 0.2
    assert last >= 0.9
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (grpo, {"epochs": 2, "minibatches": 2, "kl_coef": 0.1, "dynamic_sampling": True}),
        (pmd, {"choose": "prioritised", "curriculum": "number", "curriculum_steps": 4}),
        (
            ppo,
            {
                "completions": 1,
                "kl_coef": 0.1,
                "kl_target": 0.01,
                "critic_warmup": 1,
                "critic": "shared",
            },
        ),
        (
            grpo,
            {
                "ahead": {"staleness": 2},
                "importance": "truncated",
                "dynamic_sampling": True,
                "judge": "hard",
            },
        ),
        (pmd, {"ahead": {"spare": 3, "max_new_tokens": 12}, "choose": "prioritised"}),
    ],
)
def test_a_run_that_was_killed_is_the_run_that_was_not(recipe, changes, data, tmp_path):
    """Killed when the checkpoint of step 2 is about to be there, stopped at step 4, ended at 6.

    Also where rollouts, or single groups, are under way when it is killed.
    """
    name = recipe.__name__.rpartition(".")[2]
    runs = {}
    for kind, harms in {"straight": ["none"], "harmed": ["kill:2", "term:4", "none"]}.items():
        config = config_of(recipe, tmp_path / kind, data, steps=6, **changes)
        run_apart(name, config, harms)
        runs[kind] = config.run
    assert records(runs["harmed"]) == records(runs["straight"])
    if "ahead" in changes:
        assert max(r.get("staleness/max", 0) for r in records(runs["straight"])) > 0
    weights = [Path(run) / "model" / "model.safetensors" for run in runs.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_what_cannot_be_judged_is_counted_by_kind_and_left_out(data, tmp_path):
    config = config_of(grpo, tmp_path / "run", data, judge="hard", steps=5)
    assert grpo.train(config) == 0
    logged = [record for record in records(config.run) if "reward" in record]
    none = sum(record.get("rewards/failed/none", 0) for record in logged)
    error = sum(record.get("rewards/failed/error", 0) for record in logged)
    assert (none, error) == (80, 80)  # 5 rollouts of 8 prompts are one pass over 40, 8 each
    assert sum(record["rewards/missing"] for record in logged) == 160


def test_a_group_of_one_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        config_of(grpo, tmp_path / "run", data, completions=1)


def test_adapters_have_their_start_as_reference(data, tmp_path):
    """With LoRA the first rollout's KL to the reference is 0 to rounding, and later it is not."""
    base = config_of(grpo, tmp_path / "base", data, steps=1)
    assert grpo.train(base) == 0
    config = config_of(grpo, tmp_path / "run", data, steps=4, kl_coef=0.1)
    model = setup.ModelConfig(path=f"{base.run}/model", lora=setup.LoRAConfig(rank=4))
    config = dataclasses.replace(config, model=model)
    assert grpo.train(config) == 0
    kl = [record["kl"] for record in records(config.run) if "kl" in record]
    assert kl[0] < 1e-9
    assert kl[-1] > 1e-4
    shutil.rmtree(base.run)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, [1]), ({"check_every": 1}, [1, 2, 3]), ({"importance": "truncated"}, [1, 2, 3])],
)
def test_when_the_sampler_is_compared_with_the_trainer(changes, steps, data, tmp_path):
    """On policy only now and then; whenever the weights need the trainer's own probabilities."""
    config = config_of(grpo, tmp_path / "run", data, steps=3, **changes)
    assert grpo.train(config) == 0
    name = "sampling/sampling_logp_difference/max"
    assert [record["step"] for record in records(config.run) if name in record] == steps


@pytest.mark.parametrize(
    ("recipe", "changes", "ahead", "told"),
    [
        (grpo, {}, {"staleness": 1}, "correct for that with importance"),
        (ppo, {"completions": 1}, {"spare": 1}, "correct for that with importance"),
        (pmd, {"loss": "mirror_descent"}, {"spare": 1}, "use loss: pmd"),
        (
            pmd,
            {"loss": "pmd_token", "log_low": -0.5, "log_high": 0.3},
            {"staleness": 1},
            "use loss: pmd",
        ),
        (pmd, {}, {"stale_after": 0}, "rollout.staleness or rollout.spare"),
        (pmd, {"loss": "pmd_token"}, {}, "log_low and log_high"),
        (pmd, {"log_low": -0.1}, {}, "log_low and log_high"),
    ],
)
def test_tokens_of_an_earlier_policy_are_not_taken_for_its_own(
    recipe, changes, ahead, told, data, tmp_path
):
    with pytest.raises(ValueError, match=told):
        config_of(recipe, tmp_path / "run", data, ahead=ahead, **changes)


def test_rewards_come_while_the_next_rollout_is_sampled(data, tmp_path):
    """A reward of rollout 1 that waits for one of rollout 2: one step off the run ends."""
    (tmp_path / "meet.py").write_text(MEETING.format(folder=tmp_path))
    ahead = {"staleness": 1}
    config = config_of(grpo, tmp_path / "run", data, ahead=ahead, steps=4, importance="truncated")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval=None),
        reward=rewards.RewardConfig(f"{tmp_path / 'meet.py'}:meet", workers=2, deadline=60),
    )
    assert grpo.train(config) == 0
    logged = [record["rewards/missing"] for record in records(config.run) if "reward" in record]
    assert logged == [0.0] * 4


MEETING = '''
import pathlib, time

FOLDER = pathlib.Path("{folder}")


def meet(completions, number, **_):
    """All of a group at once; the first group ever waits until 9 groups, more than a rollout."""
    (FOLDER / f"seen_{{time.monotonic_ns()}}").touch()
    try:
        (FOLDER / "first").touch(exist_ok=False)
    except FileExistsError:
        return [float(len(text)) for text in completions]
    while len(list(FOLDER.glob("seen_*"))) < 9:
        time.sleep(0.01)
    return [float(len(text)) for text in completions]
'''


def test_the_entropy_bonus_adapts_to_its_target(data, tmp_path):
    """Under the target the weight rises by a step each rollout; it survives a stop."""
    changes = {"entropy_target": 50.0, "entropy_step": 0.25}
    config = config_of(grpo, tmp_path / "run", data, steps=2, **changes)
    assert grpo.train(config) == 0
    assert grpo.train(dataclasses.replace(config, steps=4)) == 0
    logged = [r["entropy_coef"] for r in records(config.run) if "entropy_coef" in r]
    assert logged == [0.0, 0.25, 0.5, 0.75]


def test_the_entropy_bonus_counts_only_under_its_target():
    """The weights of four rollouts, of which each goes by the entropy of the one before."""
    controller = controllers.EntropyController(coef=0.0, target=1.0, step=0.25)
    weights = []
    for entropy in (0.5, 0.5, 2.0, 0.5):
        weights.append(controller.weight)
        controller.adapt(entropy)
    assert weights == [0.0, 0.25, 0.5, 0.0]
    assert controller.weight == 0.5
    assert controllers.EntropyController(coef=0.3, target=1.0, step=0.25).weight == 0.0
    assert controllers.EntropyController(coef=0.3, target=None, step=0.25).weight == 0.3


def test_solved_prompts_fill_up_where_the_others_are_too_few(data, tmp_path):
    """38 of 40 prompts are solved, and 8 are asked: the two others first."""
    config = config_of(pmd, tmp_path / "run", data, choose="prioritised")
    stream = prompts.PromptStream(config.data, setup.load_tokenizer(config.model), seed=0)
    chooser = pmd.Chooser(config, stream)
    solved = [0.0 if row in (3, 17) else 1.0 for row in range(40)]
    chooser.set_state(chooser.get_state() | {"success": {"solved": solved, "asked": [1.0] * 40}})
    rows = [prompt.row for prompt in chooser.take(1, 8)]
    assert set(rows[:2]) == {3, 17}
    assert len(set(rows)) == 8
    with pytest.raises(ValueError, match="41 different prompts are wanted, and only 40"):
        chooser.take(1, 41)


def test_closed_prompts_are_asked_last(data, tmp_path):
    """Rollout 5 of 10 of a curriculum has the 20 easiest of 40 open, and the first at least 8."""
    changes = {"curriculum": "number", "curriculum_steps": 10}
    config = config_of(pmd, tmp_path / "run", data, **changes)
    stream = prompts.PromptStream(config.data, setup.load_tokenizer(config.model), seed=0)
    chooser = pmd.Chooser(config, stream)
    assert {prompt.row for prompt in chooser.take(1, 8)} == set(range(8))
    assert {prompt.row for prompt in chooser.take(5, 8)} < set(range(20))


ONE = {"completions": 1}
SEVERAL = {"minibatches": 2}
PROMPT = {"completions": 1, "critic": "prompt"}
OPO = {"advantage": "optimal_baseline", "loss": "reinforce", "aggregation": "sequence_sum_mean"}
TOKENS = {"loss": "pmd_token", "log_low": 0.0, "log_high": 0.0}


@pytest.mark.parametrize(
    ("recipe", "changes", "told"),
    [
        (grpo, {"std_epsilon": 1e-4, "advantage": "leave_one_out"}, "std_epsilon is for advantage"),
        (grpo, {"entropy_step": 0.1}, "entropy_step is for entropy_target"),
        (grpo, {"refills": 3}, "refills is for dynamic_sampling"),
        (grpo, {"loss": "sapo", "clip_high": 0.3}, "sapo has no clip"),
        (grpo, {"loss": "gspo", "aggregation": "token_mean"}, "a mean over sequences"),
        (grpo, {"loss": "reinforce", "epochs": 2}, "reinforce has no ratio"),
        (grpo, {**OPO, "loss": "ppo_clip", **SEVERAL}, "tokens of the policy itself"),
        (
            grpo,
            {**OPO, "importance": "truncated", "ahead": {"staleness": 1}},
            "tokens of the policy itself",
        ),
        (
            grpo,
            {"completions": 1, "advantage": "greedy_baseline", "dynamic_sampling": True},
            "group of one",
        ),
        (ppo, {**ONE, "kl_horizon": 100.0}, "kl_horizon is for kl_target"),
        (ppo, {**ONE, "value_loss": "squared", "value_clip": 0.1}, "squared has no clip"),
        (ppo, {**ONE, "critic_warmup": 5, "steps": 5}, "the policy would never be trained"),
        (ppo, {**PROMPT, "stop_penalty": -1.0}, "stop_penalty is -1; use 0"),
        (ppo, {**PROMPT, "whiten": True}, "remove whiten"),
        (ppo, {**PROMPT, "value_loss": "squared"}, "a loss of its own"),
        (pmd, TOKENS, "both 0"),
        (pmd, {"length_weight": 0.1, "length_after": 4, "steps": 4}, "would never count"),
        (pmd, {"ahead": {"staleness": 2, "stale_after": 1}}, "nothing would be trained"),
        (pmd, {"ahead": {"stop_strings": ("",)}}, "which is in every text"),
    ],
)
def test_a_key_that_does_nothing_or_harm_is_refused(recipe, changes, told, data, tmp_path):
    with pytest.raises(ValueError, match=told):
        config_of(recipe, tmp_path / "run", data, **changes)


@pytest.mark.parametrize("recipe", [grpo, ppo, pmd])
def test_what_needs_held_out_prompts_is_refused_without_them(recipe, data, tmp_path):
    config = config_of(recipe, tmp_path / "run", data)
    without = dataclasses.replace(config.data, eval=None)
    best = dataclasses.replace(accuracy.BEST, keep_best=1)
    for part, told in (
        ({"eval": accuracy.EvalConfig(every=2)}, "eval.every needs data.eval"),
        ({"eval": accuracy.EvalConfig(samples=4)}, "eval.samples needs data.eval"),
        ({"checkpoint": best}, "checkpoint.keep_best needs data.eval"),
    ):
        assert dataclasses.replace(config, **part)
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(config, data=without, **part)
    for part, told in (
        ({"checkpoint": checkpoint.CheckpointConfig(keep_best=1)}, "eval/loss, which no"),
        ({"eval": accuracy.EvalConfig(samples=4, pass_at=(8,))}, "eval.pass_at holds 8"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(config, **part)
    default = {field.name: field.default for field in dataclasses.fields(recipe.Config)}
    assert default["checkpoint"].metric == "eval/accuracy"
    assert default["checkpoint"].mode == "max"


def test_the_policys_schedule_begins_after_the_critics_warm_up(data, tmp_path):
    """Down a line to 0 over the 3 rollouts · 2 updates that it is trained in; so it moves."""
    line = optimizers.OptimizerConfig("sgd", 1.0, "linear", b1=0.0, max_grad_norm=None)
    changes = {"completions": 1, "epochs": 2, "steps": 5, "critic_warmup": 2}
    config = config_of(ppo, tmp_path / "run", data, **changes)
    config = dataclasses.replace(config, optimizer=line, critic_optimizer=line)
    optimizer, rates = ppo.make_optimizer(config)
    params = {name: {"kernel": jnp.zeros(())} for name in ("policy", "critic")}
    state, moved, said = optimizer.init(params), [], []
    for step in range(config.updates):
        changes, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        moved.append([-float(changes[name]["kernel"]) for name in params])
        said.append(
            [float(rates(step)[name]) for name in ("learning_rate", "critic_learning_rate")]
        )
    expected = [0] * 4 + [1 - n / 6 for n in range(6)], [1 - n / 10 for n in range(10)]
    np.testing.assert_allclose(moved, np.transpose(expected), atol=1e-6)
    np.testing.assert_allclose(said, moved, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (grpo, {"ahead": {"top_p": 0.9}, "kl_coef": 0.05}),
        (pmd, {"ahead": {"top_k": 3, "staleness": 2}}),
        pytest.param(
            grpo,
            {"ahead": {"top_k": 3, "staleness": 1}, "importance": "truncated"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ppo,
            {"ahead": {"top_p": 0.5}, "kl_coef": 0.1, "completions": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tokens_that_can_no_longer_be_drawn_do_no_harm(recipe, changes, data, tmp_path):
    """At a rate so high that a policy's likeliest tokens change from one update to the next."""
    config = config_of(recipe, tmp_path / "run", data, steps=4, rate=3e-2, **changes)
    assert recipe.train(config) == 0
    logged = [r for r in records(config.run) if "loss" in r]
    outside = [r[name] for r in logged for name in r if name.startswith("outside_support/")]
    assert max(outside) > 0
    assert max(abs(r["loss"]) for r in logged) < 100
    assert max(r["grad_norm"] for r in logged) < 1000


def test_rewards_that_a_critic_of_prompts_cannot_predict_stop_the_run(data, tmp_path):
    (tmp_path / "judge.py").write_text("def wide(completion, example):\n    return 2.0\n")
    config = config_of(ppo, tmp_path / "run", data, steps=1, **PROMPT)
    own = rewards.RewardConfig(f"{tmp_path / 'judge.py'}:wide")
    with pytest.raises(ValueError, match="has 2; scale the reward"):
        ppo.train(dataclasses.replace(config, reward=own))


def test_dynamic_sampling_tells_of_all_that_was_seen(data, tmp_path):
    """Half of the prompts cannot be judged; tokens and missing rewards are of every group."""
    changes = {"dynamic_sampling": True, "judge": "hard", "steps": 1, "refills": 4, "samples": 64}
    config = config_of(grpo, tmp_path / "run", data, **changes)
    assert grpo.train(config) == 0
    logged = next(r for r in records(config.run) if "dynamic/sampled" in r)
    seen, filled = int(logged["dynamic/sampled"]), int(logged["dynamic/filled"])
    assert seen == 40 or filled == 0
    stream = prompts.PromptStream(config.data, setup.load_tokenizer(config.model), seed=0)
    unjudged = sum(prompt.example["number"] % 4 < 2 for prompt in stream.take(seen))
    assert logged["rewards/missing"] == 8 * unjudged
    assert logged["dynamic/equal"] >= unjudged
    lines = (Path(config.run) / "samples.jsonl").read_text().splitlines()
    kept = [r for r in map(json.loads, lines) if r["split"] == "train"]
    assert len(kept) == 64
    groups = [[r["reward"] for r in kept[first : first + 8]] for first in range(0, 64, 8)]
    mixed = [set(group) == {0.0, 1.0} for group in groups]
    assert mixed == [True] * (8 - filled) + [False] * filled


def test_a_curriculum_knows_only_prompts_that_can_be_asked(data, tmp_path):
    """Of six rows one is empty and one too long; the numerals of a CSV file are numbers."""
    lines = ["prompt,level", "a:,5", ",0", f"{'x' * 80}:,1", "b:,2", "c:,1e1", "d:,3"]
    (tmp_path / "levels.csv").write_text("".join(line + "\n" for line in lines))
    changes = {"curriculum": "level", "curriculum_steps": 4}
    config = config_of(pmd, tmp_path / "run", data, **changes)
    given = prompts.PromptConfig(train=str(tmp_path / "levels.csv"), max_prompt_tokens=40)
    stream = prompts.PromptStream(given, setup.load_tokenizer(config.model), seed=0)
    chooser = pmd.Chooser(config, stream)
    assert {prompt.prompt for prompt in chooser.take(1, 1)} == {"b:"}
    assert {prompt.prompt for prompt in chooser.take(2, 2)} == {"b:", "d:"}
    assert {prompt.prompt for prompt in chooser.take(4, 4)} == {"a:", "b:", "c:", "d:"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"completions": 4, "prompts": 8}, "are dropped"),
        pytest.param({"max_new_tokens": 3}, "are dropped", marks=pytest.mark.slow),
        pytest.param({"spare": 0}, "are dropped", marks=pytest.mark.slow),
    ],
)
def test_what_is_under_way_under_other_settings_is_dropped(change, told, data, tmp_path, caplog):
    """Stopped after two rollouts, with a rollout ahead and groups begun, and changed."""
    ahead = {"spare": 3, "staleness": 1, "max_new_tokens": 6}
    first = config_of(pmd, tmp_path / "run", data, ahead=ahead, steps=2, resume_anyway=True)
    assert pmd.train(first) == 0
    second = dataclasses.replace(
        first, steps=4, rollout=dataclasses.replace(first.rollout, **change)
    )
    assert pmd.train(second) == 0
    logged = (Path(first.run) / "log.txt").read_text() + caplog.text
    assert told in logged
    assert [r["step"] for r in records(first.run) if "reward" in r] == [1, 2, 3, 4]


def test_an_edited_reward_is_noticed(tmp_path, caplog):
    (tmp_path / "judge.py").write_text(REWARD)
    config = rewards.RewardConfig(f"{tmp_path / 'judge.py'}:small")
    then = course.RewardFiles(config).get_state()
    course.RewardFiles(config).set_state(then)
    assert "was changed" not in caplog.text
    (tmp_path / "judge.py").write_text(REWARD + "# other\n")
    course.RewardFiles(config).set_state(then)
    assert "judge.py was changed since the checkpoint" in caplog.text
