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

Absent: the value of the last state in the place of a reward where a completion was cut short, more
updates of the critic than of the policy (Open-Reasoner-Zero: 12 to 1), and a critic that begins as
the reward model.

    jaxpost quickstart --method ppo
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpost import (
    advantages,
    compact,
    logps,
    loss_weights,
    losses,
    metrics,
    optimizers,
    ratios,
    rewards,
    train_step,
)
from jaxpost.data import prompts as prompt_data
from jaxpost.models import heads
from jaxpost.options import check_ranges, option
from jaxpost.recipes import (
    accuracy,
    ahead,
    controllers,
    course,
    critics,
    experience,
    setup,
    support,
    told,
)
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(course.RunConfig):
    """Proximal policy optimisation with a value head."""

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
    epochs: int = option(4, "passes over each rollout", least=1)
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
    whiten: bool | None = option(
        None,
        "advantages with mean 0 and variance 1 over the rollout; null: yes, but for critic: prompt",
    )
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

    def __post_init__(self):
        check_ranges(self)
        if self.critic_warmup >= self.steps:
            raise ValueError(
                f"critic_warmup is {self.critic_warmup} of {self.steps} rollouts: the policy would "
                "never be trained; make it shorter"
            )
        optimizers.check_warmup(self.optimizer, self.updates - self.resting)
        optimizers.check_warmup(self.critic_optimizer, self.updates)
        experience.check_parts(self.rollout, self.minibatches, self.microbatches)
        experience.check_importance(self.rollout, self.importance)
        accuracy.check_held_out(self.data, self.eval, self.checkpoint)
        for told_so in contradictions(self):
            raise ValueError(told_so)

    @property
    def resting(self) -> int:
        """The first updates, of the critic alone."""
        return self.critic_warmup * self.epochs * self.minibatches

    def make_critic(self) -> critics.Critic:
        return critics.of_prompts() if self.critic == "prompt" else critics.of_tokens(self)


def contradictions(config: Config) -> Iterator[str]:
    """Keys that would do nothing, and choices that do not go together."""
    if config.kl_target is not None and not config.kl_coef:
        yield "kl_target adapts kl_coef, which is 0; give it a start, such as 0.15"
    if config.kl_horizon != 10_000.0 and config.kl_target is None:
        yield "kl_horizon is for kl_target"
    if config.value_loss == "squared" and config.value_clip != 0.2:
        yield "value_loss: squared has no clip; remove value_clip"
    if config.critic == "prompt":
        yield from contradictions_of_prompts(config)


def contradictions_of_prompts(config: Config) -> Iterator[str]:
    if (config.lam, config.gamma) != (0.95, 1.0):
        yield "critic: prompt has no gae; remove gamma and lam"
    if config.whiten_rewards or config.kl_coef:
        yield "critic: prompt predicts the reward itself, 0 to 1; remove whiten_rewards, kl_coef"
    if config.whiten:
        yield "critic: prompt trains on reward - prediction as it is; remove whiten"
    if (config.value_loss, config.value_clip) != ("clip", 0.2):
        yield "critic: prompt has a loss of its own, without a clip; remove value_loss, value_clip"
    if config.stop_penalty is not None and not 0.0 <= config.stop_penalty <= 1.0:
        yield (
            f"critic: prompt predicts rewards from 0 to 1, and stop_penalty is "
            f"{config.stop_penalty:g}; use 0"
        )


class Batch(NamedTuple):
    """Completions as rows [B, T]; 0 outside the mask.

    `read` is what the model reads, as rows or in fewer (`compact`). `values` are the critic's
    before the update. `trained` are the tokens to train on, of which `weigh` makes the weights of
    an update; `value_weights` are those of the value loss.
    """

    read: Any
    targets: Any
    completion_mask: Any
    trained: Any
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

    `hidden` is the policy's, which a shared critic reads.
    """
    if config.critic != "shared":
        trunk = train_step.merge(params["critic"]["trunk"], params["policy"], policy.trainable)
        hidden = compact.hidden(policy.model, trunk, batch.read)
    values = heads.read(params["critic"]["head"], hidden)
    return config.make_critic().read(values, batch.completion_mask)


def make_values(config: Config, policy: setup.Policy) -> Callable[[Params, experience.Rows], Array]:
    """`(params, rows) -> values [B, T]`."""

    def values(params: Params, part: experience.Read) -> Array:
        hidden = compact.hidden(policy.model, params["policy"], part.read)
        return values_of(config, policy, params, hidden, part)

    return experience.in_parts(values, policy.model, config.microbatches)


# The update ------------------------------------------------------------------------------------


def make_objective(config: Config, policy: setup.Policy) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the rows given."""
    settings, critic = experience.score_settings(config.rollout, policy.model), config.make_critic()

    def token_loss(scores: logps.TokenScores, weights: Array, old: Array, gains: Array) -> Array:
        loss = policy_loss(config, support.kept(scores.logps, old), old, gains)
        loss = jnp.where(support.inside(scores.logps), loss, 0.0)
        if config.entropy_coef:
            loss += config.entropy_coef * losses.entropy_bonus(scores.entropies)
        return weights * loss

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden = compact.hidden(policy.model, params["policy"], batch.read)
        of_policy, scores = logps.loss_of_hidden(
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
        of_tokens = critic.loss(values, batch.values, batch.returns, batch.completion_mask)
        of_critic = jnp.sum(batch.value_weights * of_tokens)
        found = measures(config, scores, jax.lax.stop_gradient(values), batch)
        found |= {"policy_loss": of_policy, "value_loss": of_critic}
        return of_policy + config.value_coef * of_critic, found

    return objective


def policy_loss(config: Config, new: Array, old: Array, gains: Array) -> Array:
    """Of each token, by its advantage."""
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.dual_clip is None:
        return losses.ppo_clip(new, old, gains, **clip)
    return losses.ppo_dual_clip(new, old, gains, **clip, dual_clip=config.dual_clip)


def measures(
    config: Config, scores: logps.TokenScores, values: Array, batch: Batch
) -> dict[str, Array]:
    """Sums over the tokens that are trained, whatever their weight; `summary` divides them."""
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    new, old = support.kept(scores.logps, batch.old_logps), batch.old_logps
    ratio = ratios.ratio(new, old)
    per_token = {
        "tokens": jnp.ones_like(new),
        "policy/entropy_avg": scores.entropies,
        "policy/clipfrac_avg": metrics.clip_fraction(new, old, batch.advantages, **clip),
        "policy/approxkl_avg": metrics.approx_kl(new, old),
        "val/ratio": ratio,
        "val/ratio_var": jnp.square(ratio - 1.0),
        **config.make_critic().moved(values, batch.values),
    }
    if config.rollout.truncates:
        per_token["outside_support/now"] = ~support.inside(scores.logps)
    return {name: jnp.sum(jnp.where(batch.trained, x, 0.0)) for name, x in per_token.items()}


def make_optimizer(
    config: Config,
) -> tuple[optax.GradientTransformation, Callable[[Array], dict[str, Array]]]:
    """Policy and critic apart, and `step -> learning rates`.

    The policy rests while the critic warms up; its schedule begins then.
    """
    of_policy, schedule = optimizers.make_optimizer(
        config.optimizer, config.updates - config.resting
    )
    of_critic, critic_schedule = optimizers.make_optimizer(config.critic_optimizer, config.updates)

    def rates(step: Array) -> dict[str, Array]:
        own = jnp.where(step < config.resting, 0.0, schedule(step - config.resting))
        return {"learning_rate": own, "critic_learning_rate": critic_schedule(step)}

    return optimizers.side_by_side(
        {"policy": optimizers.resting(of_policy, config.resting), "critic": of_critic}
    ), rates


def weigh(config: Config, batch: Batch) -> Batch:
    """Fixes the loss weights over the whole update, before it is split."""
    factor = experience.correction(config.importance, batch.old_logps, batch.sampler_logps)
    return batch._replace(
        loss_weights=loss_weights.token_mean(batch.trained) * factor,
        value_weights=config.make_critic().weights(batch.trained),
    )


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation, trainable: Any
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    objective = make_objective(config, policy)
    return setup.make_update(
        config, objective, optimizer, trainable, functools.partial(weigh, config)
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
    out |= {name: metrics.ratio(value, tokens) for name, value in total.items()}
    # Kept as squares about 1, which ratios are near: their variance is less the mean's own square.
    out["val/ratio_var"] -= jnp.square(out["val/ratio"] - 1.0)
    return out


# The batch -------------------------------------------------------------------------------------


def rewards_of(config: Config, found: Experience) -> Array:
    """[B]: as judged, or the penalty; NaN where there is none.

    Raises:
      ValueError: a reward that `critic: prompt` cannot predict.
    """
    scores = jnp.asarray(found.rewards.reshape(-1))
    if config.stop_penalty is not None:
        stopped = jnp.asarray(~found.truncated.reshape(-1))
        scores = advantages.stop_penalty(scores, stopped, penalty=config.stop_penalty)
    outside = (scores < 0) | (scores > 1)
    if config.critic == "prompt" and outside.any():
        row = int(jnp.argmax(outside))
        raise ValueError(
            f"critic: prompt predicts rewards from 0 to 1, and the completion of "
            f"{found.prompts[row // found.completions].where} has {float(scores[row]):g}; scale "
            "the reward, or use critic: separate"
        )
    return scores


def make_batch(
    config: Config,
    scores: Array,
    rows: experience.Rows,
    old: Array,
    values: Array,
    kl: Array,
    kl_coef: float,
) -> Batch:
    """Advantages and returns of rewards [B].

    `kl` is log(π_old / π_ref) of each token, 0 without a reference. Tokens that π_old could not
    have drawn are not trained.
    """
    there = ~jnp.isnan(scores)
    mask = jnp.asarray(rows.completion_mask) & there[:, None]
    trained = mask & (rows.loss_weights != 0) & support.inside(old)
    gains, returns = config.make_critic().gains(
        critics.Told(jnp.where(there, scores, 0.0), kl, values, mask, trained, kl_coef)
    )
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        trained=trained,
        loss_weights=trained.astype(jnp.float32),
        value_weights=trained.astype(jnp.float32),
        old_logps=support.kept(old, rows.sampler_logps),
        sampler_logps=rows.sampler_logps,
        advantages=gains,
        values=values,
        returns=returns,
    )


def of_rollout(
    config: Config, batch: Batch, scores: Array, kl: Array, kl_coef: float
) -> dict[str, Array]:
    """What is logged of the rollout itself, before any update; objectives are of a completion."""
    trained, worth = batch.trained, config.make_critic().worth(batch.values)
    count = jnp.sum(jnp.any(trained, axis=1))

    def per_sequence(of_tokens: Array) -> Array:
        return metrics.ratio(jnp.sum(jnp.where(trained, of_tokens, 0.0)), count)

    there = ~jnp.isnan(scores)
    score = metrics.ratio(jnp.sum(jnp.where(there, scores, 0.0)), jnp.sum(there))
    penalty = -kl_coef * per_sequence(kl)
    return {
        "objective/kl": per_sequence(kl),
        "objective/kl_coef": jnp.asarray(kl_coef),
        "objective/entropy": per_sequence(-batch.old_logps),
        "objective/scores": score,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": score + penalty,
        "values/mean": metrics.ratio(jnp.sum(jnp.where(trained, worth, 0.0)), jnp.sum(trained)),
        "values/explained_variance": metrics.explained_variance(worth, batch.returns, trained),
    }


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        opened = course.open_parts(config, run, stack)
        policy, data = opened.policy, opened.data
        params, trainable = with_critic(config, policy)
        optimizer, rates = make_optimizer(config)
        state = train_step.init_state(params, optimizer, trainable=trainable)
        reference = experience.starting_point(policy) if config.kl_coef else None
        controller = controllers.KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        rollouts = ahead.Rollouts(config, opened, lambda _, count: data.take(count))
        source = experience.Together({"prompts": data, "rollouts": rollouts, "kl_coef": controller})
        start, state, here = course.begin(config, opened, state, trainable, source, stack)
        out, watch = here.out, here.watch
        update = make_update(config, policy, optimizer, trainable)
        score = experience.make_scores(policy.model, config.rollout, config.microbatches)
        evaluate_values = make_values(config, policy)
        for each in (config.optimizer, config.critic_optimizer):
            setup.tell_of_schedule(run.changed, each, start, config.updates // config.steps)
        if start == 0:
            course.measure(here, 0, state.params["policy"])
        for step in range(start + 1, config.steps + 1):
            order = jax.random.fold_in(opened.key, step)
            found = rollouts.next(step, state.params["policy"], watch)
            rows = experience.rows_of(found, config.rollout.stale_after)
            out.write(step, {**told.summary(found), "epoch": data.epoch})
            if config.rollout.off_policy:
                out.write(step, told.staleness(found))
            with watch.part("logps"):
                old = score(state.params["policy"], rows)
                values = evaluate_values(state.params, rows)
                kl, scored = jnp.zeros_like(old), {"before": old}
                if reference is not None:
                    frozen = train_step.merge(reference, state.params["policy"], policy.trainable)
                    scored["reference"] = score(frozen, rows)
                    kl = support.within(losses.kl_k1, old, scored["reference"])
                jax.block_until_ready((old, values, kl))
            if config.rollout.truncates:
                out.write(step, told.outside(rows, scored))
            if config.importance != "none" or (step - 1) % config.check_every == 0:
                out.write(step, told.agreement(old, rows))
            scores = rewards_of(config, found)
            batch = make_batch(config, scores, rows, old, values, kl, controller.kl_coef)
            of_now = of_rollout(config, batch, scores, kl, controller.kl_coef)
            controller.adapt(float(of_now["objective/kl"]), len(found.texts))
            gained = told.of_completions(batch.advantages, batch.trained)
            out.samples(step, told.records(found, "train", config.samples, gained))
            with watch.part("update"):
                sums, rate = [], rates(state.step)
                for part in experience.passes(batch, config, order, policy.model):
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            setup.check(out.write(step, {**of_now, **summary(sums), **rate}))
            if course.end_step(config, here, step, state, state.params["policy"], found):
                return run.exit_code
        return course.finish(config, here, state.params["policy"])
