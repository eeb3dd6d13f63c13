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
reward is in no baseline and in no weight.

    jaxpost train configs/grpo_smollm2_family.yaml
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    rewards,
    runs,
    train_step,
    writer,
)
from jaxpost import config as configs
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import prompts as prompt_data
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import accuracy, ahead, experience, setup
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Config:
    """Group-relative policy optimisation with a reward function."""

    run: str = option(help="folder of the run: checkpoints, metrics, samples, the trained model")
    model: setup.ModelConfig = option(help="the policy to train")
    data: prompt_data.PromptConfig = option(help="prompts, and what the reward reads of them")
    reward: rewards.RewardConfig = option(help="what judges a completion")
    rollout: experience.RolloutConfig = option(experience.RolloutConfig(), "sampling")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="constant"), "the optimizer"
    )
    steps: int = option(200, "how long to train", "rollouts", least=1)
    epochs: int = option(1, "passes over each rollout", least=1)
    minibatches: int = option(1, "updates of a pass, over as many parts of the rollout", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
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
        "while it is under this, falls above, and counts only under it (Skywork-OR1)",
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
    samples: int = option(4, "completions of a rollout written to samples.jsonl", least=0)
    seed: int = option(0, "of everything random", least=0)
    eval: accuracy.EvalConfig = option(accuracy.EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.updates)
        experience.check_parts(self.rollout, self.minibatches, self.microbatches)
        if self.advantage != "greedy_baseline":
            experience.check_groups(self.rollout)
        if self.std_epsilon != 1e-6 and self.advantage not in NORMALIZED:
            raise ValueError(f"std_epsilon is for advantage: {' or '.join(NORMALIZED)}")
        if self.entropy_step != 0.005 and self.entropy_target is None:
            raise ValueError("entropy_step is for entropy_target")
        experience.check_importance(self.rollout, self.importance)
        if self.loss == "reinforce" and (self.clip_low or self.clip_high):
            raise ValueError("loss: reinforce has no clip; remove clip_low and clip_high")
        if self.kl != "k3" and not self.kl_coef:
            raise ValueError("kl is the estimator of the KL term, which kl_coef: 0 leaves out")
        if self.loss == "sapo" and (self.clip_low or self.clip_high):
            raise ValueError("loss: sapo has no clip; remove clip_low and clip_high")
        if self.overlong_margin > self.rollout.max_new_tokens:
            raise ValueError("overlong_margin is above rollout.max_new_tokens")

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.epochs * self.minibatches

    @property
    def on_policy(self) -> bool:
        """Whether the only update of a rollout is at the parameters that sampled it."""
        return self.epochs * self.minibatches == 1

    def scores_old(self, step: int) -> bool:
        """Whether the trainer scores a rollout before its updates: for a ratio, or to compare."""
        compares = self.importance != "none" or (step - 1) % self.check_every == 0
        return compares or not self.on_policy


NORMALIZED = {
    "group_normalized": advantages.group_normalized,
    "batch_normalized": advantages.batch_normalized,
}
GROUPED = {
    "group_centered": advantages.group_centered,
    "leave_one_out": advantages.leave_one_out,
    "mean_normalized": advantages.mean_normalized,
    "contrast_scaled": advantages.contrast_scaled,
}


class Batch(NamedTuple):
    """Completions as rows [B, T]; 0 outside the mask. `ref_logps` is None without a KL term.

    `read` is what the model reads, as rows or in fewer (`compact`). `loss_weights` are 1 on the
    tokens to train, until `make_update` fixes them over its update. On policy `old_logps` are not
    looked at. `entropy_weights` are the bonus's coefficient.
    """

    read: Any
    targets: Any
    completion_mask: Any
    loss_weights: Any
    advantages: Any
    old_logps: Any
    sampler_logps: Any
    ref_logps: Any
    entropy_weights: Any


class Given(NamedTuple):
    """What the loss of a token is given besides its scores, [B, T] or some of its tokens."""

    loss_weights: Array
    advantages: Array
    old_logps: Array
    ref_logps: Array
    entropy_weights: Array


def given_of(batch: Batch) -> Given:
    """Without a reference the old log-probabilities stand in, and nothing looks at them."""
    ref = batch.old_logps if batch.ref_logps is None else batch.ref_logps
    return Given(batch.loss_weights, batch.advantages, batch.old_logps, ref, batch.entropy_weights)


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the rows given."""
    settings = experience.score_settings(config.rollout, model)
    policy_loss = make_policy_loss(config)

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        def token_loss(scores: logps.TokenScores, *data: Array) -> Array:
            given = Given(*data)
            loss = policy_loss(scores.logps, given, batch)
            if config.kl_coef:
                loss += config.kl_coef * kl_term(config, scores.logps, given)
            if config.entropy_coef or config.entropy_target is not None:
                loss += given.entropy_weights * losses.entropy_bonus(scores.entropies)
            return given.loss_weights * loss

        given, hidden = given_of(batch), compact.hidden(model, params, batch.read)
        scored = (hidden, model.head(params), batch.targets, batch.completion_mask, settings)
        if config.loss == "gspo":  # a token's loss depends on its whole sequence
            scores = logps.score_hidden(*scored)
            loss = jnp.sum(token_loss(scores, *given))
        else:
            loss, scores = logps.loss_of_hidden(*scored, token_loss, *given)
        return loss, measures(config, jax.lax.stop_gradient(scores), given)

    return objective


def old_of(config: Config, logps: Array, given: Given) -> Array:
    """Those of the policy that sampled; in the only update of a rollout that is the policy."""
    return jax.lax.stop_gradient(logps) if config.on_policy else given.old_logps


def make_policy_loss(config: Config) -> Callable[[Array, Given, Batch], Array]:
    """`(logps, given, batch) -> loss` of each token; only GSPO looks at the batch."""
    named = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    clip = {name: value for name, value in named.items() if value is not None}
    if config.loss == "reinforce":
        return lambda logps, given, batch: losses.reinforce(logps, given.advantages)
    if config.loss == "gspo":
        return lambda logps, given, batch: gspo(config, clip, logps, given, batch)
    loss = {
        "ppo_clip": losses.ppo_clip,
        "ppo_dual_clip": losses.ppo_dual_clip,
        "cispo": losses.cispo,
        "sapo": losses.sapo,
    }[config.loss]
    return lambda logps, given, batch: loss(
        logps, old_of(config, logps, given), given.advantages, **clip
    )


def gspo(config: Config, clip: dict[str, float], logps: Array, given: Given, batch: Batch) -> Array:
    """GSPO token by token, which with weights of `sequence_mean` is GSPO."""
    log_ratios = loss_weights.sequence_means(
        jax.lax.stop_gradient(logps) - old_of(config, logps, given),
        batch.completion_mask,
    )
    return losses.gspo_token(logps, log_ratios, given.advantages, **clip)


def kl_term(config: Config, logps: Array, given: Given) -> Array:
    """The KL estimate of each token, with the gradient that its name stands for."""
    if config.kl == "k3_weighted":
        return losses.kl_k3_weighted(logps, old_of(config, logps, given), given.ref_logps)
    estimate = {"k2": losses.kl_k2, "k3": losses.kl_k3, "k3_plus": losses.kl_k3_plus}[config.kl]
    return estimate(logps, given.ref_logps)


def measures(config: Config, scores: logps.TokenScores, given: Given) -> dict[str, Array]:
    """Sums over the tokens that are trained; `summary` divides them by their number."""
    old = old_of(config, scores.logps, given)
    clip = {"clip_low": config.clip_low or 0.2, "clip_high": config.clip_high or 0.2}
    clipped = metrics.clip_fraction(scores.logps, old, given.advantages, **clip)
    per_token = {
        "tokens": jnp.ones_like(scores.logps),
        "entropy": scores.entropies,
        "clip_ratio/low_mean": jnp.where(given.advantages < 0, clipped, 0.0),
        "clip_ratio/high_mean": jnp.where(given.advantages > 0, clipped, 0.0),
        "clip_ratio/region_mean": clipped,
        "approx_kl": metrics.approx_kl(scores.logps, old),
    }
    if config.kl_coef:
        per_token["kl"] = losses.kl_k3(scores.logps, given.ref_logps)
    trained = given.loss_weights != 0
    return {name: jnp.sum(jnp.where(trained, x, 0.0)) for name, x in per_token.items()}


def make_batch(
    config: Config,
    found: Experience,
    rows: experience.Rows,
    old: Array,
    ref: Array | None,
    *,
    entropy_weight: float = 0.0,
    greedy: Array | None = None,
) -> Batch:
    """Advantages from rewards, and which tokens are trained; `greedy` [P] are ReMax's baselines."""
    trained = ~np.isnan(found.rewards)
    if config.mask_truncated:
        trained &= ~found.truncated
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        loss_weights=rows.loss_weights * trained.reshape(-1, 1),
        advantages=token_advantages(config, found, rows.completion_mask, greedy),
        old_logps=old,
        sampler_logps=rows.sampler_logps,
        ref_logps=ref,
        entropy_weights=np.where(rows.completion_mask, np.float32(entropy_weight), 0.0),
    )


def token_advantages(
    config: Config, found: Experience, mask: Any, greedy: Array | None = None
) -> Array:
    """[B, T]: each completion's advantage at its tokens, of the shaped rewards."""
    values, lengths, mask = (
        jnp.asarray(found.rewards),
        jnp.asarray(found.lengths),
        jnp.asarray(mask),
    )
    if config.overlong_margin:
        most = config.rollout.max_new_tokens
        values += advantages.overlong_penalty(
            lengths, max_length=most, margin=config.overlong_margin
        )
    if config.advantage == "reinforce_plus_plus_baseline":
        return advantages.reinforce_plus_plus_baseline(values, mask)
    if config.advantage == "optimal_baseline":
        return advantages.per_token(advantages.optimal_baseline(values, lengths), mask)
    if config.advantage == "greedy_baseline":
        assert greedy is not None
        return advantages.per_token(advantages.greedy_baseline(values, greedy), mask)
    if config.advantage in NORMALIZED:
        scaled = NORMALIZED[config.advantage](values, epsilon=config.std_epsilon)
        return advantages.per_token(scaled, mask)
    return advantages.per_token(GROUPED[config.advantage](values), mask)


def greedy_rewards(
    config: Config,
    policy: setup.Policy,
    params: Params,
    found: Experience,
    key: Array,
    scorer: rewards.Scorer,
    watch: writer.Stopwatch,
) -> Array | None:
    """[P], of each prompt's most probable completion, for ReMax; NaN where it has no reward."""
    if config.advantage != "greedy_baseline":
        return None
    greedy = accuracy.greedy(config.rollout)
    one = experience.collect(policy, params, found.prompts, key, greedy, scorer, watch)
    return jnp.asarray(one.rewards[:, 0])


class EntropyController:
    """The weight of the entropy bonus: fixed, or adapting to `entropy_target`.

    The entropy that it goes by is that of the rollout before, as its update measured it.
    """

    def __init__(self, config: Config):
        self._config = config
        self._coef, self.weight = config.entropy_coef, config.entropy_coef

    def adapt(self, entropy: float) -> None:
        """`entropy` in nats a token, of the last rollout."""
        if self._config.entropy_target is not None:
            coef, weight = coefficients.adaptive_entropy(
                self._coef,
                entropy,
                target=self._config.entropy_target,
                step=self._config.entropy_step,
            )
            self._coef, self.weight = float(coef), float(weight)

    def get_state(self) -> dict[str, Any]:
        return {"coef": self._coef, "weight": self.weight}

    def set_state(self, state: dict[str, Any]) -> None:
        self._coef, self.weight = state["coef"], state["weight"]


def weighted(config: Config, batch: Batch) -> Batch:
    """Fixes the weights over the whole update, before it is split."""
    chosen = batch.loss_weights
    if config.aggregation == "fixed_length":
        length, rows = config.rollout.max_new_tokens, chosen.shape[0]
        weights = loss_weights.fixed_length(chosen, length, rows)
    else:
        weights = {
            "sequence_mean": loss_weights.sequence_mean,
            "token_mean": loss_weights.token_mean,
            "sequence_sum_mean": loss_weights.sequence_sum_mean,
        }[config.aggregation](chosen)
    factor = experience.correction(config.importance, batch.old_logps, batch.sampler_logps)
    return batch._replace(loss_weights=weights * factor)


def make_update(
    config: Config,
    policy: setup.Policy,
    optimizer: optax.GradientTransformation,
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    step = train_step.make_train_step(
        make_objective(config, policy.model),
        optimizer,
        microbatches=config.microbatches,
        trainable=policy.trainable,
    )
    return jax.jit(lambda state, batch: step(state, weighted(config, batch)), donate_argnums=0)


def summary(sums: list[dict[str, Array]]) -> dict[str, Array]:
    """What is logged of a rollout's updates: the mean loss, and ratios of sums over all."""
    total = jax.tree.map(lambda *each: sum(each), *sums)
    count, tokens = len(sums), total.pop("tokens")
    out = {"loss": total.pop("loss") / count, "grad_norm": total.pop("grad_norm") / count}
    return out | {name: metrics.ratio(value, tokens) for name, value in total.items()}


def refilled(
    config: Config,
    policy: setup.Policy,
    params: Params,
    seen: Experience,
    data: prompt_data.PromptStream,
    key: Array,
    scorer: rewards.Scorer,
    watch: writer.Stopwatch,
) -> tuple[Experience, dict[str, float]]:
    """What is trained of a rollout: with dynamic sampling, prompts that are solved now and then.

    Raises:
      ValueError: after all refills no group has both right and wrong completions.
    """
    if not config.dynamic_sampling:
        return seen, {}
    for refill in range(1, config.refills + 1):
        if len(mixed(config, seen)) >= config.rollout.prompts:
            break
        prompts, here = data.take(config.rollout.prompts), jax.random.fold_in(key, refill)
        more = experience.collect(policy, params, prompts, here, config.rollout, scorer, watch)
        seen = experience.join([seen, more])
    return chosen(config, seen)


def mixed(config: Config, found: Experience) -> list[int]:
    """The prompts of which some completions are correct and some are not."""
    correct = jnp.asarray(found.rewards >= config.eval.correct)
    chosen = advantages.mixed_groups(correct, jnp.asarray(~np.isnan(found.rewards)))
    return np.flatnonzero(np.asarray(chosen)).tolist()


def chosen(config: Config, seen: Experience) -> tuple[Experience, dict[str, float]]:
    """As many prompts as a rollout has: mixed ones, and where they are too few, others."""
    kept, wanted = mixed(config, seen), config.rollout.prompts
    others = [p for p in range(len(seen.prompts)) if p not in kept]
    if not kept:
        raise ValueError(
            f"dynamic_sampling: of {len(seen.prompts)} prompts none has both right and wrong "
            "completions; use easier or harder prompts, more rollout.completions, or leave it out"
        )
    missing = max(wanted - len(kept), 0)
    return seen.groups([*kept[:wanted], *others[:missing]]), {
        "dynamic/sampled": float(len(seen.prompts)),
        "dynamic/equal": float(len(others)),
        "dynamic/left_over": float(max(len(kept) - wanted, 0)),
        "dynamic/filled": float(missing),
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
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.updates)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        fitting = experience.that_fit(config.data, config.rollout, policy.model)
        data = prompt_data.PromptStream(fitting, policy.tokenizer, seed=config.seed)
        stack.callback(data.close)
        scorer = stack.enter_context(rewards.Scorer(config.reward))
        saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
        reference = experience.starting_point(policy) if config.kl_coef else None
        rollouts = ahead.Rollouts(
            policy,
            config.rollout,
            scorer,
            lambda _, count: data.take(count),
            data.prompt,
            steps=config.steps,
            key=key,
        )
        entropy = EntropyController(config)
        source = experience.Together({"prompts": data, "rollouts": rollouts, "entropy": entropy})
        start, state, counters = setup.resume(run, saver, state, policy.trainable, source)
        print(*data.summary, sep="\n")
        out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
        update = make_update(config, policy, optimizer)
        score = experience.make_scores(policy.model, config.rollout, config.microbatches)
        evaluate = accuracy.make_evaluation(config, policy, scorer, out)
        meter, watch = writer.Meter(counters=counters), writer.Stopwatch()

        setup.tell_of_schedule(run.changed, config.optimizer, start, config.updates // config.steps)
        if start == 0:
            with meter.pause():
                out.write(0, evaluate(0, state.params))
        for step in range(start + 1, config.steps + 1):
            here = jax.random.fold_in(key, step)
            found = rollouts.next(step, state.params, watch)
            found, counts = refilled(config, policy, state.params, found, data, here, scorer, watch)
            rows = experience.rows_of(found, config.rollout.stale_after)
            out.write(step, {**experience.summary(found), **counts, "epoch": data.epoch})
            if config.rollout.off_policy:
                out.write(step, ahead.staleness(found))
            with watch.part("logps"):
                old, ref = rows.sampler_logps, None
                if config.scores_old(step):
                    old = score(state.params, rows)
                    out.write(step, experience.agreement(old, rows))
                if reference is not None:
                    frozen = train_step.merge(reference, state.params, policy.trainable)
                    ref = score(frozen, rows)
                jax.block_until_ready((old, ref))
            greedy = greedy_rewards(config, policy, state.params, found, here, scorer, watch)
            batch = make_batch(
                config, found, rows, old, ref, entropy_weight=entropy.weight, greedy=greedy
            )
            out.samples(step, experience.records(found, batch.advantages, config.samples))
            with watch.part("update"):
                sums = []
                rate = schedule(state.step)
                for part in experience.passes(batch, config, here, policy.model):
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            measured = {**summary(sums), "learning_rate": rate}
            setup.check(out.write(step, measured))
            if config.entropy_target is not None:
                out.write(step, {"entropy_coef": entropy.weight})
                entropy.adapt(float(measured["entropy"]))
            out.write(step, meter.update(int(found.rollout.lengths.sum()), len(found.texts)))
            stopping, scores = run.should_stop(step), {}
            with meter.pause():
                if config.eval.due(step, config.steps):
                    scores = evaluate(step, state.params)
                    out.write(step, scores)
                out.write(step, watch.lap())
                if saver.due(step) or stopping or step == config.steps:
                    setup.check(out.flush())
                    setup.save(
                        saver, step, state, policy.trainable, source, meter, resolved, scores
                    )
                saver.check()
            if stopping:
                return run.exit_code
        saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
