"""Group-relative policy optimisation: RL whose baseline is the other completions of a prompt.

A rollout samples G completions of each of P prompts, a reward judges them, and each token's
advantage is that of its completion within its group (arXiv 2402.03300). Then the policy is updated
`epochs` · `minibatches` times. The variants are choices of advantage, weights and loss:

    GRPO     advantage: group_normalized  aggregation: sequence_mean       loss: ppo_clip
    Dr.GRPO  advantage: group_centered    aggregation: fixed_length        loss: ppo_clip
    DAPO     advantage: group_normalized  aggregation: token_mean          loss: ppo_clip
             clip_high: 0.28  dynamic_sampling: true  overlong_margin: 4096
    GSPO     advantage: group_normalized  aggregation: sequence_mean       loss: gspo
    CISPO    advantage: group_normalized  aggregation: token_mean          loss: cispo
    RLOO     advantage: leave_one_out     aggregation: sequence_sum_mean   loss: reinforce
    ReMax    advantage: greedy_baseline   aggregation: sequence_sum_mean   loss: reinforce

Departures: 1. the paper does not state the clip, ours is 0.2; 2. no KL term unless `kl_coef` asks
for one (the paper's is 0.04), and then k3 in the loss, as in the paper; 3. a completion that has no
reward is in no baseline and in no weight; so are, in ReMax, the completions of a prompt whose
greedy one has none; 4. a token that a policy with top_k, top_p or min_p cannot draw any more is
left out of the terms that it would make infinite, and counted.

Absent: rewards of steps (`advantages.process_advantages`), the iterative form that renews reference
and reward model, and for RLOO the KL in the reward and the clip of a whole completion's ratio.

    jaxpost train configs/grpo_smollm2_family.yaml
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
from jaxpost.recipes import (
    accuracy,
    ahead,
    controllers,
    course,
    dynamic,
    experience,
    gains,
    setup,
    support,
    told,
)
from jaxpost.recipes.gains import Gains
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config(course.RunConfig):
    """Group-relative policy optimisation with a reward function."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: prompt_data.PromptConfig = option(help="prompts, and what the reward reads of them")
    reward: rewards.RewardConfig = option(help="what judges a completion")
    rollout: experience.RolloutConfig = option(experience.RolloutConfig(), "sampling")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="constant"), "the optimizer"
    )
    advantage: Literal[
        "group_normalized",
        "group_centered",
        "leave_one_out",
        "batch_normalized",
        "mean_normalized",
        "contrast_scaled",
        "optimal_baseline",
        "reinforce_plus_plus_baseline",
        "greedy_baseline",
    ] = option("group_normalized", "what is taken off a reward, and what it is divided by")
    std_epsilon: float = option(
        1e-6, "added to the deviation that rewards are divided by; TRL: 1e-4", above=0
    )
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum_mean", "fixed_length"] = (
        option("sequence_mean", "from token losses to the update's loss")
    )
    loss: Literal["ppo_clip", "ppo_dual_clip", "gspo", "cispo", "sapo", "reinforce"] = option(
        "ppo_clip", "the loss of a token"
    )
    clip_low: float | None = option(
        None, "the ratio's range is [1 - clip_low, 1 + clip_high]; null: the loss's own", above=0
    )
    clip_high: float | None = option(None, "null: the loss's own (0.2 for ppo_clip)", above=0)
    kl_coef: float = option(0.0, "weight of the KL term to the reference; 0: no reference", least=0)
    kl: Literal["k2", "k3", "k3_plus", "k3_weighted"] = option(
        "k3", "its estimator: k3 as in the paper, k2 for the exact gradient"
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0)
    entropy_target: float | None = option(
        None,
        "hold the entropy from below: the weight rises from entropy_coef by entropy_step a rollout "
        "while the last one's was under this, falls above, and counts only under it (Skywork-OR1)",
        "nats a token",
        above=0,
    )
    entropy_step: float = option(0.005, "see entropy_target", above=0)
    importance: experience.Importance = option(
        "none",
        "weight by trainer / sampler probability of a token: up to 2, or 0 outside [0.5, 2]",
    )
    dynamic_sampling: bool = option(
        False, "replace groups that are all right or all wrong by further ones (DAPO)"
    )
    refills: int = option(10, "further rollouts that may be sampled to replace groups", least=1)
    overlong_margin: int = option(
        0, "the last tokens over which a penalty falls to -1 (DAPO); 0: none", "tokens", least=0
    )
    mask_truncated: bool = option(False, "do not train on completions cut by their length")
    check_every: int = option(
        50, "compare the sampler's log-probabilities with the trainer's", "rollouts", least=1
    )

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.updates)
        experience.check_parts(self.rollout, self.minibatches, self.microbatches)
        experience.check_importance(self.rollout, self.importance)
        used = ["correct"] if self.dynamic_sampling else []
        accuracy.check_held_out(self.data, self.eval, self.checkpoint, used)
        if self.advantage != "greedy_baseline" or self.dynamic_sampling:
            experience.check_groups(self.rollout)
        for told_so in contradictions(self):
            raise ValueError(told_so)

    @property
    def on_policy(self) -> bool:
        """Whether a rollout has one update, so that its ratios are all 1."""
        return self.epochs * self.minibatches == 1

    def scores_old(self, step: int) -> bool:
        """Whether the trainer scores a rollout before its updates: for a ratio, or to compare."""
        compares = self.importance != "none" or (step - 1) % self.check_every == 0
        return compares or not self.on_policy


def contradictions(config: Config) -> Iterator[str]:
    """Keys that would do nothing, and choices that would not be what they are called."""
    if config.std_epsilon != 1e-6 and config.advantage not in gains.NORMALIZED:
        yield f"std_epsilon is for advantage: {' or '.join(gains.NORMALIZED)}"
    if config.entropy_step != 0.005 and config.entropy_target is None:
        yield "entropy_step is for entropy_target"
    if config.loss not in CLIPS and (config.clip_low or config.clip_high):
        yield f"loss: {config.loss} has no clip; remove clip_low and clip_high"
    if config.kl != "k3" and not config.kl_coef:
        yield "kl is the estimator of the KL term, which kl_coef: 0 leaves out"
    if config.overlong_margin > config.rollout.max_new_tokens:
        yield "overlong_margin is above rollout.max_new_tokens"
    if config.refills != 10 and not config.dynamic_sampling:
        yield "refills is for dynamic_sampling"
    if config.loss == "gspo" and config.aggregation != "sequence_mean":
        yield "loss: gspo is a mean over sequences; set aggregation: sequence_mean"
    if config.loss == "reinforce" and not config.on_policy:
        yield (
            "loss: reinforce has no ratio to correct for the updates before, so epochs and "
            "minibatches are 1; or use another loss"
        )
    if config.advantage == "optimal_baseline" and not (
        config.on_policy and not config.rollout.off_policy
    ):
        yield (
            "advantage: optimal_baseline is for tokens of the policy itself: epochs and "
            "minibatches are 1, and rollout.staleness and rollout.spare 0; or use another"
        )


# A loss's own clip_low and clip_high; the others have none.
CLIPS = {
    "ppo_clip": (0.2, 0.2),
    "ppo_dual_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}


class Batch(NamedTuple):
    """Completions as rows [B, T]; 0 outside the mask.

    `read` is what the model reads, as rows or in fewer (`compact`). `trained` are the tokens to
    train on, of which `weigh` makes the loss weights of an update. On policy `old_logps` are not
    looked at. `of_terms` is what single terms need: `ref_logps`, and `entropy_weights`, the
    bonus's coefficient.
    """

    read: Any
    targets: Any
    completion_mask: Any
    trained: Any
    loss_weights: Any
    advantages: Any
    old_logps: Any
    sampler_logps: Any
    of_terms: dict[str, Any]


class Given(NamedTuple):
    """What the loss of a token is given besides its scores, [B, T] or some of its tokens."""

    loss_weights: Array
    advantages: Array
    old_logps: Array
    of_terms: dict[str, Array]


Term = Callable[[logps.TokenScores, Given], Array]


# The update ------------------------------------------------------------------------------------


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the rows given."""
    settings = experience.score_settings(config.rollout, model)

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        policy = policy_term(config, batch)
        terms = [policy, *further_terms(config)]
        given = Given(batch.loss_weights, batch.advantages, batch.old_logps, batch.of_terms)
        data, tree = jax.tree.flatten(given)

        def token_loss(scores: logps.TokenScores, *data: Array) -> Array:
            here = jax.tree.unflatten(tree, data)
            return here.loss_weights * sum(term(scores, here) for term in terms)

        hidden = compact.hidden(model, params, batch.read)
        scored = (hidden, model.head(params), batch.targets, batch.completion_mask, settings)
        if config.loss == "gspo":  # a token's loss depends on its whole sequence
            scores = logps.score_hidden(*scored)
            loss = jnp.sum(token_loss(scores, *data))
        else:
            loss, scores = logps.loss_of_hidden(*scored, token_loss, *data)
        scores = jax.lax.stop_gradient(scores)
        of_policy = jnp.sum(given.loss_weights * policy(scores, given))
        return loss, {"policy_loss": of_policy, **measures(config, scores, batch, given)}

    return objective


def new_and_old(config: Config, scores: logps.TokenScores, given: Given) -> tuple[Array, Array]:
    """Log-probabilities now and before the update, which its only update does not change."""
    new = support.kept(scores.logps, given.old_logps)
    return new, jax.lax.stop_gradient(new) if config.on_policy else given.old_logps


def policy_term(config: Config, batch: Batch) -> Term:
    """The loss of a token by its advantage; only GSPO looks at the batch."""
    clip = clip_of(config)
    by_ratio = {
        "ppo_clip": losses.ppo_clip,
        "ppo_dual_clip": losses.ppo_dual_clip,
        "cispo": losses.cispo,
        "sapo": losses.sapo,
    }

    def term(scores: logps.TokenScores, given: Given) -> Array:
        new, old = new_and_old(config, scores, given)
        if config.loss == "reinforce":
            found = losses.reinforce(new, given.advantages)
        elif config.loss == "gspo":
            ratios = sequence_log_ratios(new, old, batch)
            found = losses.gspo_token(new, ratios, given.advantages, **clip)
        else:
            found = by_ratio[config.loss](new, old, given.advantages, **clip)
        return jnp.where(support.inside(scores.logps), found, 0.0)

    return term


def clip_of(config: Config) -> dict[str, float]:
    """The clip of the loss, for those that have one."""
    if config.loss not in CLIPS:
        return {}
    low, high = CLIPS[config.loss]
    return {
        "clip_low": low if config.clip_low is None else config.clip_low,
        "clip_high": high if config.clip_high is None else config.clip_high,
    }


def sequence_log_ratios(new: Array, old: Array, batch: Batch) -> Array:
    """GSPO's log s: with weights of `sequence_mean`, GSPO-token is GSPO."""
    gaps = jax.lax.stop_gradient(new) - old
    return loss_weights.sequence_means(gaps, batch.completion_mask)


def further_terms(config: Config) -> Iterator[Term]:
    """The KL term and the entropy bonus, where they are asked for."""
    if config.kl_coef:
        yield lambda scores, given: config.kl_coef * kl_term(config, scores, given)
    if has_bonus(config):
        yield (
            lambda scores, given: (
                given.of_terms["entropy_weights"] * losses.entropy_bonus(scores.entropies)
            )
        )


def has_bonus(config: Config) -> bool:
    return bool(config.entropy_coef) or config.entropy_target is not None


def kl_term(config: Config, scores: logps.TokenScores, given: Given) -> Array:
    """The KL estimate of each token, with the gradient that its name stands for."""
    ref = given.of_terms["ref_logps"]
    if config.kl == "k3_weighted":
        _, old = new_and_old(config, scores, given)
        return support.within(losses.kl_k3_weighted, scores.logps, old, ref)
    estimate = {"k2": losses.kl_k2, "k3": losses.kl_k3, "k3_plus": losses.kl_k3_plus}[config.kl]
    return support.within(estimate, scores.logps, ref)


def measures(
    config: Config, scores: logps.TokenScores, batch: Batch, given: Given
) -> dict[str, Array]:
    """Sums over the tokens that are trained, whatever their weight; `summary` divides them."""
    new, old = new_and_old(config, scores, given)
    per_token = {
        "tokens": jnp.ones_like(new),
        "entropy": scores.entropies,
        "approx_kl": metrics.approx_kl(new, old),
    }
    if config.kl_coef:
        ref = given.of_terms["ref_logps"]
        per_token["kl"] = support.within(losses.kl_k3, scores.logps, ref)
    if config.rollout.truncates:
        per_token["outside_support/now"] = ~support.inside(scores.logps)
    if config.loss in CLIPS:
        per_token |= clipped(config, new, old, batch)
    return {name: jnp.sum(jnp.where(batch.trained, x, 0.0)) for name, x in per_token.items()}


def clipped(config: Config, new: Array, old: Array, batch: Batch) -> dict[str, Array]:
    """Where the loss's own clip takes effect, of so many tokens; of sequences in GSPO."""
    shares = jnp.ones_like(new)
    if config.loss == "gspo":
        new, old = sequence_log_ratios(new, old, batch), jnp.zeros_like(old)
        totals = loss_weights.sequence_totals(batch.trained.astype(jnp.float32), None)
        shares = shares / jnp.maximum(totals, 1.0)
    hit = shares * metrics.clip_fraction(new, old, batch.advantages, **clip_of(config))
    if config.loss == "cispo":
        return {"clip/of": shares, "clip/weight": hit}
    return {
        "clip/of": shares,
        "clip/low": jnp.where(batch.advantages < 0, hit, 0.0),
        "clip/high": jnp.where(batch.advantages > 0, hit, 0.0),
    }


def weigh(config: Config, batch: Batch) -> Batch:
    """Fixes the loss weights over the whole update, before it is split."""
    if config.aggregation == "fixed_length":
        length, rows = config.rollout.max_new_tokens, batch.trained.shape[0]
        weights = loss_weights.fixed_length(batch.trained, length, rows)
    else:
        weights = {
            "sequence_mean": loss_weights.sequence_mean,
            "token_mean": loss_weights.token_mean,
            "sequence_sum_mean": loss_weights.sequence_sum_mean,
        }[config.aggregation](batch.trained)
    factor = experience.correction(config.importance, batch.old_logps, batch.sampler_logps)
    return batch._replace(loss_weights=weights * factor)


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    objective = make_objective(config, policy.model)
    return setup.make_update(
        config, objective, optimizer, policy.trainable, functools.partial(weigh, config)
    )


def summary(sums: list[dict[str, Array]]) -> dict[str, Array]:
    """What is logged of a rollout's updates: mean losses, and ratios of sums over all."""
    total, count = jax.tree.map(lambda *each: sum(each), *sums), len(sums)
    out = {name: total.pop(name) / count for name in ("loss", "grad_norm", "policy_loss")}
    tokens = total.pop("tokens")
    clip = {name: total.pop(name) for name in list(total) if name.startswith("clip/")}
    out |= {name: metrics.ratio(value, tokens) for name, value in total.items()}
    if "clip/weight" in clip:
        out["cispo_clip_ratio"] = metrics.ratio(clip["clip/weight"], clip["clip/of"])
    elif clip:
        low, high = (
            jnp.stack([metrics.ratio(each[name], each["clip/of"]) for each in sums])
            for name in ("clip/low", "clip/high")
        )
        out |= {
            "clip_ratio/low_mean": metrics.ratio(clip["clip/low"], clip["clip/of"]),
            "clip_ratio/low_min": jnp.min(low),
            "clip_ratio/high_mean": metrics.ratio(clip["clip/high"], clip["clip/of"]),
            "clip_ratio/high_max": jnp.max(high),
        }
        out["clip_ratio/region_mean"] = out["clip_ratio/low_mean"] + out["clip_ratio/high_mean"]
    return out


# The batch -------------------------------------------------------------------------------------


def make_batch(
    rows: experience.Rows,
    gained: Gains,
    old: Array,
    of_terms: dict[str, Array] | None = None,
) -> Batch:
    """Rows with what the losses need; tokens that `old` could not have drawn are not trained."""
    trained = gained.trained & support.inside(old)
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        trained=trained,
        loss_weights=trained.astype(jnp.float32),
        advantages=gained.advantages,
        old_logps=support.kept(old, rows.sampler_logps),
        sampler_logps=rows.sampler_logps,
        of_terms=of_terms or {},
    )


def entropy_weights(rows: experience.Rows, weight: float) -> Array:
    """[B, T], of the bonus."""
    return jnp.where(rows.completion_mask, jnp.float32(weight), 0.0)


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
        reference = experience.starting_point(policy) if config.kl_coef else None
        rollouts = ahead.Rollouts(config, opened, lambda _, count: data.take(count))
        entropy = controllers.EntropyController(
            config.entropy_coef, config.entropy_target, config.entropy_step
        )
        source = experience.Together({"prompts": data, "rollouts": rollouts, "entropy": entropy})
        start, state, here = course.begin(config, opened, state, policy.trainable, source, stack)
        out, watch = here.out, here.watch
        update = make_update(config, policy, optimizer)
        score = experience.make_scores(policy.model, config.rollout, config.microbatches)
        setup.tell_of_schedule(run.changed, config.optimizer, start, config.updates // config.steps)
        if start == 0:
            course.measure(here, 0, state.params)
        for step in range(start + 1, config.steps + 1):
            order, further = jax.random.split(jax.random.fold_in(opened.key, step))
            found = seen = rollouts.next(step, state.params, watch)
            if config.dynamic_sampling:
                seen = dynamic.refilled(config, opened, state.params, found, further, watch)
                found, counts = dynamic.kept_of(config, seen)
                out.write(step, counts)
            rows = experience.rows_of(found, config.rollout.stale_after)
            out.write(step, {**told.summary(seen), "epoch": data.epoch})
            if config.rollout.off_policy:
                out.write(step, told.staleness(found))
            with watch.part("logps"):
                old, of_terms, scored = rows.sampler_logps, {}, {}
                if config.scores_old(step):
                    old = scored["before"] = score(state.params, rows)
                    out.write(step, told.agreement(old, rows))
                if reference is not None:
                    frozen = train_step.merge(reference, state.params, policy.trainable)
                    of_terms["ref_logps"] = scored["reference"] = score(frozen, rows)
                if has_bonus(config):
                    of_terms["entropy_weights"] = entropy_weights(rows, entropy.weight)
                jax.block_until_ready((old, of_terms))
            if config.rollout.truncates:
                out.write(step, told.outside(rows, scored))
            if config.advantage == "greedy_baseline":
                greedy = gains.greedy_completions(
                    config, opened, state.params, found, further, watch
                )
                out.write(step, {"rewards/missing_greedy": float(np.isnan(greedy.rewards).sum())})
                gained = gains.against_greedy(config, found, greedy, rows)
            else:
                gained = gains.in_groups(config, found, rows)
            batch = make_batch(rows, gained, old, of_terms)
            each = told.of_completions(batch.advantages, rows.completion_mask)
            out.samples(step, told.records(found, "train", config.samples, each))
            with watch.part("update"):
                sums, rate = [], schedule(state.step)
                for part in experience.passes(batch, config, order, policy.model):
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            measured = {**summary(sums), "learning_rate": rate}
            setup.check(out.write(step, measured))
            if config.entropy_target is not None:
                out.write(step, {"entropy_coef": entropy.weight})
                entropy.adapt(float(measured["entropy"]))
            if course.end_step(config, here, step, state, state.params, seen):
                return run.exit_code
        return course.finish(config, here, state.params)
