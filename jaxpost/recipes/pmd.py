"""Policy mirror descent: each rollout poses a regression whose solution is the improved policy.

The policy that sampled the rollout is π_old; with l = log π/π_old of a whole completion and A its
centred reward, `epochs` · `minibatches` updates descend (A − τ l)² / 2τ (Kimi k1.5, arXiv
2501.12599, eq. 3; K2, arXiv 2507.20534). There is no clip, no value network and no importance
weight, and the optimizer starts anew with each rollout, since the objective is a new one.

    Kimi k1.5    loss: pmd  length_weight  curriculum  choose: prioritised
                 rollout.spare (partial rollouts)  rollout.stale_after: 0 (newest segment trained)
    Kimi K2      loss: pmd  optimizer.name: muon
    Kimi K2.5    loss: pmd_token  log_low  log_high  (arXiv 2602.02276)
    OpenKimi     loss: pmd  per_length: true  baseline: leave_one_out

Departures: 1. the square is divided by 2τ, so that τ does not scale the step; 2. τ is not disclosed
in the reports, ours is 0.1; 3. a partial rollout ends when its number of groups is done, not at a
number of tokens, so that all updates have one shape.

Absent: K2's PTX loss beside it, its token budgets, its falling temperature and its rubric rewards;
K2.5's phases with a token budget (`advantages.budgeted_rewards` is their reward); k1.5's detection
of repetitions.

    jaxpost quickstart --method pmd
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpost import (
    advantages,
    compact,
    logps,
    loss_weights,
    losses,
    metrics,
    optimizers,
    rewards,
    train_step,
)
from jaxpost.data import prompts as prompt_data
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import accuracy, ahead, course, experience, setup, support, told
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(course.RunConfig):
    """Policy mirror descent with a reward function."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: prompt_data.PromptConfig = option(help="prompts, and what the reward reads of them")
    reward: rewards.RewardConfig = option(help="what judges a completion")
    rollout: experience.RolloutConfig = option(experience.RolloutConfig(), "sampling")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="constant"), "the optimizer"
    )
    minibatches: int = option(4, "updates of a pass, over as many parts of the rollout", least=1)
    tau: float = option(0.1, "weight of staying near the policy that sampled", above=0)
    loss: Literal["pmd", "mirror_descent", "pmd_token"] = option(
        "pmd",
        "pmd: regression; mirror_descent: the step itself, with importance weights; pmd_token: by "
        "tokens, without policy gradient where log(ratio) is outside log_low to log_high (K2.5)",
    )
    log_low: float | None = option(None, "see loss: pmd_token; below 0", "nats", most=0)
    log_high: float | None = option(None, "see loss: pmd_token; above 0", "nats", least=0)
    baseline: Literal["mean", "leave_one_out", "partition", "leave_one_out_partition"] = option(
        "mean", "what is taken off a reward: of the group, of its others, or tau · log mean exp"
    )
    per_length: bool = option(False, "divide a completion's loss by its tokens")
    length_weight: float = option(
        0.0, "weight of k1.5's length reward, shorter right answers first; 0: none", least=0
    )
    length_after: int = option(0, "rollouts before the length reward counts", least=0)
    choose: Literal["shuffled", "prioritised"] = option(
        "shuffled", "prioritised: a prompt is drawn with probability ∝ 1 - its success rate"
    )
    curriculum: str | None = option(
        None, "column that holds a prompt's difficulty, a number; easy ones first"
    )
    curriculum_steps: int = option(0, "rollouts until all prompts are in", "rollouts", least=0)
    reset_optimizer: bool = option(True, "start the optimizer anew with each rollout")
    check_every: int = option(
        50, "report how far the sampler's log-probabilities are off", "rollouts", least=1
    )

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.updates)
        experience.check_parts(self.rollout, self.minibatches, self.microbatches)
        experience.check_groups(self.rollout)
        used = ["correct"] if self.length_weight or self.choose == "prioritised" else []
        accuracy.check_held_out(self.data, self.eval, self.checkpoint, used)
        for told_so in contradictions(self):
            raise ValueError(told_so)


def contradictions(config: Config) -> Iterator[str]:
    """Keys that would do nothing, and choices that do not go together."""
    if config.loss != "pmd" and config.rollout.off_policy:
        yield (
            f"loss: {config.loss} weighs tokens by the policy before the update, which must have "
            "drawn them; with rollout.staleness or rollout.spare use loss: pmd, a regression that "
            "holds for tokens of any policy"
        )
    window = (config.log_low, config.log_high)
    if window != (None, None) if config.loss != "pmd_token" else None in window:
        yield (
            "log_low and log_high are both set with loss: pmd_token (their report gives no "
            "numbers; -0.5 and 0.3 are an example), and not with another loss"
        )
    if window == (0.0, 0.0):
        yield "log_low and log_high are both 0: no token that has moved would be trained"
    if config.loss == "pmd_token" and config.per_length:
        yield "loss: pmd_token is a mean over tokens; remove per_length"
    if (config.curriculum is None) != (config.curriculum_steps == 0):
        yield "curriculum and curriculum_steps are set together, or neither"
    if config.length_after and not config.length_weight:
        yield "length_after is for length_weight above 0"
    if config.length_after >= config.steps:
        yield (
            f"length_after is {config.length_after} of {config.steps} rollouts: length_weight "
            "would never count; make it smaller"
        )


class Batch(NamedTuple):
    """Completions as rows [B, T]; the last two are one number a completion [B].

    `read` is what the model reads, as rows or in fewer (`compact`). `trained` are the tokens to
    train on, outside of which `old_logps` are 0. `loss_weights` are 1 for completions to train on,
    until `make_update` fixes them over its update, for `pmd_token` as [B, T].
    """

    read: Any
    targets: Any
    completion_mask: Any
    trained: Any
    old_logps: Any
    advantages: Any
    loss_weights: Any


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the completions given."""
    settings = experience.score_settings(config.rollout, model)
    whole = {"pmd": losses.pmd, "mirror_descent": losses.mirror_descent}

    def loss_of(new: Array, batch: Batch) -> Array:
        """By completion [B], or by token [B, T]."""
        if config.loss == "pmd_token":
            window = {"log_low": config.log_low or 0.0, "log_high": config.log_high or 0.0}
            gains = jnp.where(batch.trained, batch.advantages[:, None], 0.0)
            return losses.pmd_token(new, batch.old_logps, gains, tau=config.tau, **window)
        new, old = jnp.sum(new, axis=1), jnp.sum(batch.old_logps, axis=1)
        return whole[config.loss](new, old, batch.advantages, tau=config.tau)

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden = compact.hidden(model, params, batch.read)
        scores = logps.score_hidden(
            hidden, model.head(params), batch.targets, batch.completion_mask, settings
        )
        new = jnp.where(batch.trained, support.kept(scores.logps, batch.old_logps), 0.0)
        found = measures(config, scores, new, batch)
        return jnp.sum(batch.loss_weights * loss_of(new, batch)), found

    return objective


def measures(
    config: Config, scores: logps.TokenScores, new: Array, batch: Batch
) -> dict[str, Array]:
    """Sums over completions and tokens that are trained; `summary` divides them."""
    weighed = batch.loss_weights != 0
    completions = weighed if weighed.ndim == 1 else jnp.any(weighed, axis=1)
    tokens = batch.trained & completions[:, None]
    moved = jnp.where(completions, jnp.sum(new - batch.old_logps, axis=1), 0.0)
    out = {
        "sequences": jnp.sum(completions, dtype=jnp.float32),
        "tokens": jnp.sum(tokens, dtype=jnp.float32),
        "entropy": jnp.sum(jnp.where(tokens, scores.entropies, 0.0)),
        "log_ratio": jnp.sum(moved),
        "squared_log_ratio": jnp.sum(jnp.square(moved)),
    }
    if config.rollout.truncates:
        out["outside_support/now"] = jnp.sum(
            tokens & ~support.inside(scores.logps), dtype=jnp.float32
        )
    return jax.lax.stop_gradient(out)


def make_batch(
    config: Config, step: int, found: Experience, rows: experience.Rows, old: Array
) -> Batch:
    """Centred rewards, and which completions are trained on: those with a token to train.

    Tokens that π_old could not have drawn are not.
    """
    trained = (rows.loss_weights != 0) & support.inside(old)
    judged = jnp.asarray(~np.isnan(found.rewards).reshape(-1))
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        trained=trained,
        old_logps=jnp.where(trained, old, 0.0),
        advantages=centred_rewards(config, step, found).reshape(-1),
        loss_weights=judged & jnp.any(trained, axis=1),
    )


def centred_rewards(config: Config, step: int, found: Experience) -> Array:
    """[P, G]: rewards, the length reward included once it counts, less their baseline."""
    values = jnp.asarray(found.rewards)
    if config.length_weight and step > config.length_after:
        correct = values >= config.eval.correct
        values += config.length_weight * advantages.length_rewards(
            jnp.asarray(found.lengths), correct, ~jnp.isnan(values)
        )
    if config.baseline == "mean":
        return advantages.group_centered(values)
    if config.baseline == "leave_one_out":
        return advantages.leave_one_out(values)
    if config.baseline == "partition":
        return advantages.partition_centered(values, tau=config.tau)
    return advantages.leave_one_out_partition(values, tau=config.tau)


def weigh(config: Config, batch: Batch) -> Batch:
    """Fixes the weights over the whole update: a mean over its completions, or over its tokens."""
    if config.loss == "pmd_token":
        tokens = batch.trained & batch.loss_weights[:, None]
        return batch._replace(loss_weights=loss_weights.token_mean(tokens))
    chosen = batch.loss_weights.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(chosen), 1.0)
    if config.per_length:
        chosen /= jnp.maximum(jnp.sum(batch.trained, axis=1), 1)
    return batch._replace(loss_weights=chosen / count)


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    objective = make_objective(config, policy.model)
    return setup.make_update(
        config, objective, optimizer, policy.trainable, functools.partial(weigh, config)
    )


def summary(sums: list[dict[str, Array]]) -> dict[str, Array]:
    """What is logged of a rollout's updates: the mean loss, and ratios of sums over all."""
    total, count = jax.tree.map(lambda *each: sum(each), *sums), len(sums)
    out = {name: total.pop(name) / count for name in ("loss", "grad_norm")}
    tokens, sequences = total.pop("tokens"), total.pop("sequences")
    by_sequence = ("log_ratio", "squared_log_ratio")
    out |= {name: metrics.ratio(total.pop(name), sequences) for name in by_sequence}
    return out | {name: metrics.ratio(value, tokens) for name, value in total.items()}


class Success:
    """How often each prompt was solved, of the times that it was asked."""

    def __init__(self, rows: int):
        self.solved, self.asked = np.zeros(rows), np.zeros(rows)

    def add(self, found: Experience, correct: float) -> None:
        for prompt, values in zip(found.prompts, found.rewards, strict=True):
            self.solved[prompt.row] += np.sum(values >= correct)
            self.asked[prompt.row] += np.sum(~np.isnan(values))

    def rates(self) -> np.ndarray:
        """[rows]; 0 for a prompt that was not asked yet, so that it is asked."""
        return self.solved / np.maximum(self.asked, 1)

    def get_state(self) -> dict[str, list[float]]:
        return {"solved": self.solved.tolist(), "asked": self.asked.tolist()}

    def set_state(self, state: dict[str, list[float]]) -> None:
        self.solved, self.asked = np.array(state["solved"]), np.array(state["asked"])


class Chooser:
    """The prompts of each rollout, by the data's order, by priority or by difficulty."""

    def __init__(self, config: Config, data: prompt_data.PromptStream):
        self._config, self._data = config, data
        self._success = Success(data.rows)
        self._order: np.ndarray | None = None
        if config.curriculum is not None:
            difficulty = data.column(config.curriculum)
            known = int(np.sum(~np.isnan(difficulty)))  # the others cannot be asked, and come last
            self._order = np.argsort(difficulty, kind="stable")[:known]

    def take(self, step: int, count: int) -> list[prompt_data.Prompt]:
        """The prompts to begin with for the rollout of this step.

        Solved ones where the others are too few, and at last those that are not open yet.
        """
        if self._config.choose == "shuffled" and self._order is None:
            return self._data.take(count)
        weights, is_open = np.ones(self._data.rows), np.ones(self._data.rows)
        if self._order is not None:
            share = min(step / self._config.curriculum_steps, 1.0)
            easiest = max(int(share * len(self._order)), count)
            is_open[:] = 0.0
            is_open[self._order[:easiest]] = 1.0
        if self._config.choose == "prioritised":
            weights = np.asarray(
                advantages.prompt_priorities(jnp.asarray(self._success.rates())), np.float64
            )
        tiers = np.stack([weights * is_open, is_open, np.ones_like(weights)])
        return self._data.draw(count, tiers, step)

    def learn(self, found: Experience) -> None:
        self._success.add(found, self._config.eval.correct)

    def get_state(self) -> dict[str, Any]:
        return {"data": self._data.get_state(), "success": self._success.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._data.set_state(state["data"])
        self._success.set_state(state["success"])


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        opened = course.open_parts(config, run, stack)
        policy, data = opened.policy, opened.data
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.updates)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        chooser = Chooser(config, data)
        rollouts = ahead.Rollouts(config, opened, chooser.take)
        source = experience.Together({"prompts": chooser, "rollouts": rollouts})
        start, state, here = course.begin(config, opened, state, policy.trainable, source, stack)
        out, watch = here.out, here.watch
        update = make_update(config, policy, optimizer)
        score = experience.make_scores(policy.model, config.rollout, config.microbatches)
        setup.tell_of_schedule(run.changed, config.optimizer, start, config.updates // config.steps)
        if start == 0:
            course.measure(here, 0, state.params)
        for step in range(start + 1, config.steps + 1):
            order = jax.random.fold_in(opened.key, step)
            found = rollouts.next(step, state.params, watch)
            chooser.learn(found)
            rows = experience.rows_of(found, config.rollout.stale_after)
            out.write(step, {**told.summary(found), "epoch": data.epoch})
            if config.rollout.off_policy:
                out.write(step, told.staleness(found))
            with watch.part("logps"):
                old = jax.block_until_ready(score(state.params, rows))
            if config.rollout.truncates:
                out.write(step, told.outside(rows, {"before": old}))
            if (step - 1) % config.check_every == 0:
                out.write(step, told.agreement(old, rows))
            batch = make_batch(config, step, found, rows, old)
            gained = np.asarray(batch.advantages)
            out.samples(step, told.records(found, "train", config.samples, gained))
            with watch.part("update"):
                sums, rate = [], schedule(state.step)
                if config.reset_optimizer:
                    state = experience.restarted(state, optimizer, policy.trainable)
                for part in experience.passes(batch, config, order, policy.model):
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            setup.check(out.write(step, {**summary(sums), "learning_rate": rate}))
            if course.end_step(config, here, step, state, state.params, found):
                return run.exit_code
        return course.finish(config, here, state.params)
