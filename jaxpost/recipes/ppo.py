"""Proximal policy optimisation with a value head, for RLHF and for verifiable rewards.

A critic predicts, at every token of a completion, the reward still to come; the advantage of a
token is how much better things went than that (generalised advantage estimation, whitened over the
rollout). Policy and critic are then updated together `epochs` · `minibatches` times, both clipped
(PPO, arXiv 1707.06347; for language models arXiv 1909.08593). With a reference, the reward of every
token is lessened by kl_coef · log(π_old / π_ref), and kl_coef may adapt to a target.

    RLHF (1909.08593)        gamma: 1  lam: 0.95  kl_coef: 0.15  kl_target: 6  stop_penalty: -1
    Open-Reasoner-Zero       gamma: 1  lam: 1  kl_coef: 0  value_loss: squared
    Sequence-Level PPO       critic: prompt  (arXiv 2604.08865: the prompt alone is the state)

Departures: 1. the critic is by default a copy of the policy with its own optimizer, as newer work
has it; `critic: shared` puts the head on the policy's own trunk; 2. advantages are whitened over
the whole rollout, not by device; 3. a completion that has no reward is in no statistic and no loss.

    jaxpost quickstart --method ppo
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost import (
    advantages,
    checkpoint,
    coefficients,
    compact,
    logps,
    loss_weights,
    losses,
    metrics,
    optimizers,
    ratios,
    rewards,
    runs,
    train_step,
    writer,
)
from jaxpost import config as configs
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import prompts as prompt_data
from jaxpost.models import heads
from jaxpost.options import check_ranges, option
from jaxpost.recipes import accuracy, ahead, experience, setup
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """Proximal policy optimisation with a value head."""

    run: str = option(help="folder of the run: checkpoints, metrics, samples, the trained model")
    model: setup.ModelConfig = option(help="the policy to train")
    data: prompt_data.PromptConfig = option(help="prompts, and what the reward reads of them")
    reward: rewards.RewardConfig = option(help="what judges a completion")
    rollout: experience.RolloutConfig = option(
        experience.RolloutConfig(prompts=64, completions=1), "sampling"
    )
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="constant"), "the policy's"
    )
    critic_optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=5e-6, schedule="constant"), "the critic's"
    )
    steps: int = option(200, "how long to train", "rollouts", least=1)
    epochs: int = option(4, "passes over each rollout", least=1)
    minibatches: int = option(1, "updates of a pass, over as many parts of the rollout", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    critic: Literal["separate", "shared", "prompt"] = option(
        "separate",
        "separate: a copy of the policy with a value head; shared: a head on the policy's trunk; "
        "prompt: a copy that values the prompt alone (Sequence-Level PPO)",
    )
    critic_warmup: int = option(
        0, "first rollouts of which only the critic learns", "rollouts", least=0
    )
    gamma: float = option(1.0, "discount of a token", above=0, most=1)
    lam: float = option(0.95, "of generalised advantage estimation", least=0, most=1)
    whiten: bool = option(True, "advantages with mean 0 and variance 1 over the rollout")
    whiten_rewards: bool = option(False, "token rewards with variance 1, their mean kept")
    clip_low: float = option(0.2, "the ratio's range is [1 - clip_low, 1 + clip_high]", above=0)
    clip_high: float = option(0.2, "see clip_low", above=0)
    dual_clip: float | None = option(
        None, "with a negative advantage a loss is at most this times it; 3 is usual", above=1
    )
    value_loss: Literal["clip", "squared"] = option("clip", "whether values are clipped too")
    value_clip: float = option(0.2, "how far a value may move from the rollout's", above=0)
    value_coef: float = option(1.0, "weight of the value loss", above=0)
    kl_coef: float = option(0.0, "KL to the reference in the reward; 0: no reference", least=0)
    kl_target: float | None = option(None, "adapt kl_coef to this KL", "nats a completion", above=0)
    kl_horizon: float = option(10_000.0, "completions over which it adapts", above=0)
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0)
    stop_penalty: float | None = option(
        None,
        "the reward of a completion that does not stop by itself; null: as judged",
        least=-1e6,
        most=1e6,
    )
    importance: experience.Importance = option(
        "none",
        "weight by trainer / sampler probability of a token: up to 2, or 0 outside [0.5, 2]",
    )
    check_every: int = option(
        50, "report how far the sampler's log-probabilities are off", "rollouts", least=1
    )
    samples: int = option(4, "completions of a rollout written to samples.jsonl", least=0)
    seed: int = option(0, "of everything random", least=0)
    eval: accuracy.EvalConfig = option(accuracy.EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.updates)
        optimizers.check_warmup(self.critic_optimizer, self.updates)
        experience.check_parts(self.rollout, self.minibatches, self.microbatches)
        experience.check_importance(self.rollout, self.importance)
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0; give it a start, such as 0.15")
        if self.critic == "prompt" and (self.lam, self.gamma) != (0.95, 1.0):
            raise ValueError("critic: prompt has no gae; remove gamma and lam")
        if self.critic == "prompt" and (self.whiten_rewards or self.kl_coef):
            raise ValueError(
                "critic: prompt predicts the reward itself, 0 to 1; remove whiten_rewards, kl_coef"
            )

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.epochs * self.minibatches


class Batch(NamedTuple):
    """Completions as rows [B, T]; 0 outside the mask.

    `read` is what the model reads, as rows or in fewer (`compact`). `values` are the critic's
    before the update. The weights are 1 on the tokens to train, until `make_update` fixes them over
    its update; `value_weights` are those of the value loss.
    """

    read: Any
    targets: Any
    completion_mask: Any
    loss_weights: Any
    value_weights: Any
    old_logps: Any
    sampler_logps: Any
    advantages: Any
    values: Any
    returns: Any


# The critic ------------------------------------------------------------------------------------


def with_critic(config: Config, policy: setup.Policy) -> tuple[Params, Any]:
    """(`{"policy": …, "critic": …}`, which of it is trained).

    A critic's trunk begins as a copy of what is trained of the policy: all of it, or its adapters,
    which then stand on the same frozen parameters.
    """
    critic: dict[str, Any] = {"head": heads.zero_head(policy.model.config.width)}
    if config.critic != "shared":
        critic["trunk"] = experience.starting_point(policy)
    params = {"policy": policy.params, "critic": critic}
    if policy.trainable is None:
        return params, None
    return params, {
        "policy": policy.trainable,
        "critic": jax.tree.map(lambda _: True, critic),
    }


def values_of(
    config: Config, policy: setup.Policy, params: Params, hidden: Array, batch: Any
) -> Array:
    """[B, T], 0 outside the mask: the value of the state that each target is chosen in.

    `hidden` is the policy's, which a shared critic reads. For `critic: prompt` it is the logit of
    success at the prompt's last token, at every token of the completion.
    """
    if config.critic != "shared":
        trunk = train_step.merge(params["critic"]["trunk"], params["policy"], policy.trainable)
        hidden = compact.hidden(policy.model, trunk, batch.read)
    values = heads.read(params["critic"]["head"], hidden)
    if config.critic == "prompt":
        first = jnp.argmax(batch.completion_mask, axis=1)[:, None]
        values = jnp.take_along_axis(values, first, axis=1)
    return jnp.where(batch.completion_mask, values, 0.0)


def make_values(config: Config, policy: setup.Policy) -> Callable[[Params, experience.Rows], Array]:
    """`(params, rows) -> values [B, T]`."""

    def values(params: Params, part: experience.Read) -> Array:
        hidden = compact.hidden(policy.model, params["policy"], part.read)
        return values_of(config, policy, params, hidden, part)

    return experience.in_parts(values, policy.model, config.microbatches)


# The update ------------------------------------------------------------------------------------


def make_objective(config: Config, policy: setup.Policy) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the rows given."""
    settings = experience.score_settings(config.rollout, policy.model)
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}

    def token_loss(scores: logps.TokenScores, weights: Array, old: Array, gains: Array) -> Array:
        if config.dual_clip is None:
            loss = losses.ppo_clip(scores.logps, old, gains, **clip)
        else:
            loss = losses.ppo_dual_clip(
                scores.logps, old, gains, **clip, dual_clip=config.dual_clip
            )
        if config.entropy_coef:
            loss += config.entropy_coef * losses.entropy_bonus(scores.entropies)
        return weights * loss

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden = compact.hidden(policy.model, params["policy"], batch.read)
        policy_loss, scores = logps.loss_of_hidden(
            hidden,
            policy.model.head(params["policy"]),
            batch.targets,
            batch.completion_mask,
            settings,
            token_loss,
            batch.loss_weights,
            batch.old_logps,
            batch.advantages,
        )
        values = values_of(config, policy, params, hidden, batch)
        value_loss = jnp.sum(batch.value_weights * token_value_loss(config, values, batch))
        found = measures(config, scores, jax.lax.stop_gradient(values), batch)
        found |= {"policy_loss": policy_loss, "value_loss": value_loss}
        return policy_loss + config.value_coef * value_loss, found

    return objective


def token_value_loss(config: Config, values: Array, batch: Batch) -> Array:
    """[B, T]. A prompt has one value and one loss, which stands at each token."""
    if config.critic == "prompt":
        return jnp.where(batch.completion_mask, losses.value_bce(values, batch.returns), 0.0)
    if config.value_loss == "squared":
        return losses.value_squared(values, batch.returns)
    return losses.value_clip(values, batch.values, batch.returns, clip=config.value_clip)


def measures(
    config: Config, scores: logps.TokenScores, values: Array, batch: Batch
) -> dict[str, Array]:
    """Sums over the tokens that are trained; `summary` divides them by their number."""
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    per_token = {
        "tokens": jnp.ones_like(scores.logps),
        "policy/entropy_avg": scores.entropies,
        "policy/clipfrac_avg": metrics.clip_fraction(
            scores.logps, batch.old_logps, batch.advantages, **clip
        ),
        "policy/approxkl_avg": metrics.approx_kl(scores.logps, batch.old_logps),
        "val/clipfrac_avg": jnp.abs(values - batch.values) > config.value_clip,
        "val/ratio": ratios.ratio(scores.logps, batch.old_logps),
    }
    trained = batch.loss_weights != 0
    return {name: jnp.sum(jnp.where(trained, x, 0.0)) for name, x in per_token.items()}


def make_optimizer(config: Config) -> tuple[optax.GradientTransformation, optimizers.Schedule]:
    """Policy and critic apart; the policy rests while the critic warms up."""
    of_policy, schedule = optimizers.make_optimizer(config.optimizer, config.updates)
    of_critic, _ = optimizers.make_optimizer(config.critic_optimizer, config.updates)
    resting = config.critic_warmup * config.epochs * config.minibatches
    return optimizers.side_by_side(
        {"policy": optimizers.resting(of_policy, resting), "critic": of_critic}
    ), schedule


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation, trainable: Any
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    step = train_step.make_train_step(
        make_objective(config, policy),
        optimizer,
        microbatches=config.microbatches,
        trainable=trainable,
    )

    def update(state: train_step.TrainState, batch: Batch):
        weights = loss_weights.token_mean(batch.loss_weights)
        of_values = weights
        if config.critic == "prompt":  # one value a completion, however long
            of_values = loss_weights.sequence_mean(batch.loss_weights)
        factor = experience.correction(config.importance, batch.old_logps, batch.sampler_logps)
        batch = batch._replace(loss_weights=weights * factor, value_weights=of_values)
        return step(state, batch)

    return jax.jit(update, donate_argnums=0)


# The batch -------------------------------------------------------------------------------------


def make_batch(
    config: Config,
    found: Experience,
    rows: experience.Rows,
    old: Array,
    values: Array,
    kl: Array,
    kl_coef: float,
) -> Batch:
    """Advantages and returns; `kl` is log(π_old / π_ref) of each token, 0 without a reference."""
    scores = jnp.asarray(found.rewards.reshape(-1))
    if config.stop_penalty is not None:
        stopped = jnp.asarray(~found.truncated.reshape(-1))
        scores = advantages.stop_penalty(scores, stopped, penalty=config.stop_penalty)
    there = ~jnp.isnan(scores)
    mask = jnp.asarray(rows.completion_mask) & there[:, None]
    scores = jnp.where(there, scores, 0.0)
    if config.critic == "prompt":
        returns = jnp.where(mask, scores[:, None], 0.0)
        gains = jnp.where(mask, returns - jax.nn.sigmoid(values), 0.0)
    else:
        of_tokens = advantages.token_rewards(scores, kl, mask, kl_coef=kl_coef)
        if config.whiten_rewards:
            of_tokens = advantages.whiten(of_tokens, mask, shift_mean=False)
        gains, returns = advantages.gae(of_tokens, values, mask, gamma=config.gamma, lam=config.lam)
        if config.whiten:
            gains = advantages.whiten(gains, mask)
    weights = jnp.where(mask, rows.loss_weights, 0.0)
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        loss_weights=weights,
        value_weights=weights,
        old_logps=old,
        sampler_logps=rows.sampler_logps,
        advantages=gains,
        values=values,
        returns=returns,
    )


def summary(sums: list[dict[str, Array]]) -> dict[str, Array]:
    """What is logged of a rollout's updates: mean losses, and ratios of sums over all."""
    total = jax.tree.map(lambda *each: sum(each), *sums)
    count, tokens = len(sums), total.pop("tokens")
    out = {
        "loss": total.pop("loss") / count,
        "grad_norm": total.pop("grad_norm") / count,
        "loss/policy_avg": total.pop("policy_loss") / count,
        "loss/value_avg": total.pop("value_loss") / count,
    }
    return out | {name: metrics.ratio(value, tokens) for name, value in total.items()}


def of_rollout(batch: Batch, kl: Array, kl_coef: float) -> dict[str, Array]:
    """What is logged of the rollout itself, before any update."""
    trained = batch.loss_weights != 0
    sequences = jnp.maximum(jnp.sum(jnp.any(trained, axis=1)), 1)
    per_sequence = jnp.sum(jnp.where(trained, kl, 0.0)) / sequences
    return {
        "objective/kl": per_sequence,
        "objective/kl_coef": jnp.asarray(kl_coef),
        "objective/non_score_reward": -kl_coef * per_sequence,
        "values/mean": metrics.ratio(jnp.sum(batch.values * trained), jnp.sum(trained)),
        "values/explained_variance": metrics.explained_variance(
            batch.values, batch.returns, trained
        ),
    }


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    setup.check_devices()
    resolved = configs.to_dict(config)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            runs.open_run(
                config.run, resolved, steps=config.steps, resume_anyway=config.resume_anyway
            )
        )
        if run.finished:
            return run.exit_code
        key = jax.random.key(config.seed)
        policy = setup.load_policy(config.model, key)
        params, trainable = with_critic(config, policy)
        optimizer, schedule = make_optimizer(config)
        state = train_step.init_state(params, optimizer, trainable=trainable)
        fitting = experience.that_fit(config.data, config.rollout, policy.model)
        data = prompt_data.PromptStream(fitting, policy.tokenizer, seed=config.seed)
        stack.callback(data.close)
        scorer = stack.enter_context(rewards.Scorer(config.reward))
        saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
        reference = experience.starting_point(policy) if config.kl_coef else None
        controller = KLController(config)
        rollouts = ahead.Rollouts(
            policy,
            config.rollout,
            scorer,
            lambda _, count: data.take(count),
            data.prompt,
            steps=config.steps,
            key=key,
        )
        source = experience.Together({"prompts": data, "rollouts": rollouts, "kl_coef": controller})
        start, state, counters = setup.resume(run, saver, state, trainable, source)
        print(*data.summary, sep="\n")
        out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
        update = make_update(config, policy, optimizer, trainable)
        score = experience.make_scores(policy.model, config.rollout, config.microbatches)
        evaluate_values = make_values(config, policy)
        evaluate = accuracy.make_evaluation(config, policy, scorer, out)
        meter, watch = writer.Meter(counters=counters), writer.Stopwatch()

        setup.tell_of_schedule(run.changed, config.optimizer, start, config.updates // config.steps)
        setup.tell_of_schedule(
            run.changed, config.critic_optimizer, start, config.updates // config.steps
        )
        if start == 0:
            with meter.pause():
                out.write(0, evaluate(0, state.params["policy"]))
        for step in range(start + 1, config.steps + 1):
            here = jax.random.fold_in(key, step)
            found = rollouts.next(step, state.params["policy"], watch)
            rows = experience.rows_of(found, config.rollout.stale_after)
            out.write(step, {**experience.summary(found), "epoch": data.epoch})
            if config.rollout.off_policy:
                out.write(step, ahead.staleness(found))
            with watch.part("logps"):
                old = score(state.params["policy"], rows)
                values = evaluate_values(state.params, rows)
                kl = jnp.zeros_like(old)
                if reference is not None:
                    frozen = train_step.merge(reference, state.params["policy"], policy.trainable)
                    kl = losses.kl_k1(old, score(frozen, rows))
                jax.block_until_ready((old, values, kl))
            if (step - 1) % config.check_every == 0:
                out.write(step, experience.agreement(old, rows))
            batch = make_batch(config, found, rows, old, values, kl, controller.kl_coef)
            of_now = of_rollout(batch, kl, controller.kl_coef)
            controller.adapt(float(of_now["objective/kl"]), len(found.texts))
            out.samples(step, experience.records(found, batch.advantages, config.samples))
            with watch.part("update"):
                sums, rate = [], schedule(state.step)
                for part in experience.passes(batch, config, here, policy.model):
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            setup.check(out.write(step, {**of_now, **summary(sums), "learning_rate": rate}))
            out.write(step, meter.update(int(found.rollout.lengths.sum()), len(found.texts)))
            stopping, scores = run.should_stop(step), {}
            with meter.pause():
                if config.eval.due(step, config.steps):
                    scores = evaluate(step, state.params["policy"])
                    out.write(step, scores)
                out.write(step, watch.lap())
                if saver.due(step) or stopping or step == config.steps:
                    setup.check(out.flush())
                    setup.save(saver, step, state, trainable, source, meter, resolved, scores)
                saver.check()
            if stopping:
                return run.exit_code
        saver.wait()
        setup.export(run.folder, policy, state.params["policy"], config.model.path)
        run.finish(config.steps)
        return run.exit_code


class KLController:
    """`kl_coef`, fixed or adapting to `kl_target`."""

    def __init__(self, config: Config):
        self._config, self.kl_coef = config, config.kl_coef

    def adapt(self, kl: float, completions: int) -> None:
        """`kl` in nats a completion, of the last rollout."""
        if self._config.kl_target is not None:
            moved = coefficients.adaptive_kl(
                self.kl_coef,
                kl,
                completions,
                target=self._config.kl_target,
                horizon=self._config.kl_horizon,
            )
            self.kl_coef = float(moved)

    def get_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def set_state(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
