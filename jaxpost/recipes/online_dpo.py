"""Online DPO: preferences that are judged while training, on the policy's own samples.

A rollout draws two or more completions of each prompt. A reward (`reward`: the higher wins, the
best against the worst) or a judge of pairs (`judge`, asked in both orders) says which is better,
and a loss of pairs moves the policy (OAIF, arXiv 2402.04792). `loss` is any of `dpo`'s, several, or

    online DPO, IPO, SLiC  dpo, ipo, {slic: 1, nll: 0.1}   reference-free ones: no reference is kept
    soft labels            soft     samplers: mixture      P = σ(win_rate_scale · (r₁ − r₂)), or the
                                                           judge's; ties count (arXiv 2409.19605)
    XPO                    xpo      samplers: reference    + optimism · log π(ỹ), ỹ the reference's
                                                           sample (arXiv 2405.21046)
    Nash-MD                nash_md  samplers: opponent     RL by the rate of wins against the
                                                           geometric mixture (arXiv 2312.00886)

A pair without two rewards, of one completion twice, or tied is dropped and counted; where none of
an update is left, it is skipped. What is left is weighted over the whole update.

Departures: 1. log-probabilities are those at the rollout's temperature before top_k, top_p and
min_p cut anything off, so that none is infinite under the reference; 2. a completion cut by its
length loses nothing unless `stop_penalty` is set; 3. Nash-MD mixes its opponent of the policy and
the fixed reference, without a moving average.

    jaxpost train configs/online_dpo_sums.yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpost import (
    compact,
    logps,
    losses,
    metrics,
    optimizers,
    ratios,
    rewards,
    train_step,
)
from jaxpost.data import prompts as prompt_data
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import (
    accuracy,
    ahead,
    course,
    duels,
    experience,
    labels,
    pair_losses,
    pairwise,
    samplers,
    setup,
    told,
)
from jaxpost.recipes.labels import Labels
from jaxpost.recipes.pair_losses import FOUR, PAIR, Loss, Sides
from jaxpost.typing import Array, Params

# The losses that only samples can have ----------------------------------------------------------


def soft(
    chosen: Array,
    rejected: Array,
    ref_chosen: Array,
    ref_rejected: Array,
    win_rates: Array,
    *,
    beta: float = 0.1,
) -> Array:
    """−P log σ(β Δ) − (1 − P) log σ(−β Δ)."""
    u_chosen = ratios.log_ratio(chosen, ref_chosen)
    u_rejected = ratios.log_ratio(rejected, ref_rejected)
    return losses.soft_bradley_terry(beta * u_chosen, beta * u_rejected, win_rates)


def xpo(
    chosen: Array,
    rejected: Array,
    second: Array,
    ref_chosen: Array,
    ref_rejected: Array,
    *,
    beta: float = 0.1,
    optimism: float = 1e-5,
) -> Array:
    """`losses.xpo`; `second` is log π of the reference's sample."""
    arguments = chosen, rejected, second, ref_chosen, ref_rejected
    return losses.xpo(*arguments, beta=beta, alpha=optimism)


def nash_md(
    first_tokens: Array, ref_first_tokens: Array, first_win_rates: Array, *, beta: float = 0.1
) -> Array:
    """[B]: `losses.nash_md` summed over the policy's sample."""
    rates = first_win_rates[:, None]
    return jnp.sum(losses.nash_md(first_tokens, ref_first_tokens, rates, beta=beta), axis=1)


ONLINE = {
    "soft": Loss(soft, (*FOUR, "win_rates"), ("beta",)),
    "xpo": Loss(xpo, (*PAIR, "second", "ref_chosen", "ref_rejected"), ("beta", "optimism")),
    "nash_md": Loss(nash_md, ("first_tokens", "ref_first_tokens", "first_win_rates"), ("beta",)),
}
OF_RATES = ("soft", "nash_md")  # a tie is a label too
OWN_SAMPLERS = {"xpo": "reference", "nash_md": "opponent"}


# The configuration ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(pair_losses.LossConfig, course.RunConfig):
    """Preferences judged while training."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: prompt_data.PromptConfig = option(help="prompts, and what the reward reads of them")
    reward: rewards.RewardConfig | None = option(None, "what scores a completion; or `judge`")
    judge: rewards.JudgeConfig | None = option(None, "what compares two completions; or `reward`")
    rollout: experience.RolloutConfig = option(
        experience.RolloutConfig(prompts=32, completions=2, temperature=0.9), "sampling"
    )
    samplers: Literal["policy", "reference", "opponent", "mixture"] | None = option(
        None,
        "of a pair: policy: both are its samples; reference: the second is the reference's; "
        "opponent: of half the logits of each; mixture: first 1.5 policy - 0.5 reference, second "
        "half of each; null: the loss's own (xpo: reference, nash_md: opponent, others: policy)",
    )
    stop_penalty: float = option(
        0.0, "taken off the reward of a completion that does not stop by itself", least=0
    )
    win_rates: Literal["logistic", "hard"] = option(
        "logistic", "soft, nash_md: of two rewards, by their difference, or 1, 0.5 or 0"
    )
    win_rate_scale: float = option(1.0, "logistic win rates: factor of the difference", above=0)
    optimism: float | None = option(
        None, "xpo: weight of the reference's sample, the paper's alpha; null: 1e-5", least=0
    )
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=5e-7, schedule="constant"), "the optimizer"
    )

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.updates)
        self.check_losses(self.microbatches, {})
        train_step.check_microbatches(self.rollout.prompts, self.minibatches)
        pairs = self.rollout.prompts // self.minibatches
        train_step.check_microbatches(pairs, self.microbatches)
        for told_so in contradictions(self):
            raise ValueError(told_so)
        if self.judge is not None:
            duels.check_held_out(self)
        else:
            accuracy.check_held_out(self.data, self.eval, self.checkpoint)

    def table(self) -> Mapping[str, Loss]:
        """The losses that there are, by name."""
        return {**pair_losses.LOSSES, **ONLINE}

    def numbers(self) -> dict[str, float]:
        """The losses' own numbers, as far as they are given."""
        own = {} if self.optimism is None else {"optimism": self.optimism}
        return {**super().numbers(), **own}

    @property
    def drawn_by(self) -> str:
        """The pair of samplers, of `samplers.SAMPLERS`."""
        own = (sampler for name, sampler in OWN_SAMPLERS.items() if name in self.losses())
        return self.samplers or next(own, "policy")

    @property
    def refers(self) -> bool:
        """Whether a reference is needed, to score or to sample."""
        return self.measured() or self.drawn_by != "policy"

    @property
    def keeps_ties(self) -> bool:
        """Whether pairs that are tied are trained on."""
        return all(name in OF_RATES for name in self.losses())

    @property
    def whole(self) -> experience.RolloutConfig:
        """The rollout's distribution before anything is cut off: what is scored."""
        return dataclasses.replace(self.rollout, top_k=None, top_p=None, min_p=None)


def contradictions(config: Config) -> Iterator[str]:
    """Keys that would do nothing, and choices that do not go together."""
    of_rates = any(name in OF_RATES for name in config.losses())
    nash = "nash_md" in config.losses()
    if (config.reward is None) == (config.judge is None):
        yield "pairs are judged by a reward or by a judge: set exactly one of reward and judge"
    if config.rollout.completions < 2:
        yield "rollout.completions is 1, and a pair is two completions; sample 2 or more"
    one_pair = {
        "judge compares two": config.judge is not None,
        f"samplers: {config.drawn_by} draws one each": config.drawn_by != "policy",
        "loss: nash_md compares one with one": nash,
    }
    for why in (why for why, is_so in one_pair.items() if is_so):
        if config.rollout.completions > 2:
            yield f"{why}: rollout.completions is 2"
    if "xpo" in config.losses() and config.drawn_by != "reference":
        yield "loss: xpo is optimistic about the reference's sample; set samplers: reference"
    if nash and config.drawn_by == "mixture":
        yield "loss: nash_md trains on a sample of the policy; set samplers: opponent"
    if nash and (config.epochs * config.minibatches > 1 or config.rollout.staleness):
        yield (
            "loss: nash_md has no ratio to correct for updates since a completion was drawn: "
            "epochs and minibatches are 1, and rollout.staleness 0; or use another loss"
        )
    if config.rollout.spare or config.rollout.stale_after is not None:
        yield "rollout.spare and stale_after are of tokens; a pair's completions are compared whole"
    for key, default in {"win_rates": "logistic", "win_rate_scale": 1.0}.items():
        if getattr(config, key) != default and (config.judge is not None or not of_rates):
            yield f"{key} is of rewards, for loss: {' and '.join(OF_RATES)}"
    shaped = config.divergence != "reverse_kl" or config.length_weight != 1.0
    if shaped and all(name == "nash_md" for name in config.losses()):
        yield "divergence and length_weight are of pairs; loss: nash_md has none"
    if config.win_rate_scale != 1.0 and config.win_rates == "hard":
        yield "win_rate_scale is for win_rates: logistic"


# The update -------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The sides of pairs as rows [2P, T]: chosen, rejected, chosen, ….

    `read` is what the model reads, as rows or in fewer (`compact`). `token_weights` and `ref_logps`
    [2P, T] are 0 outside the mask. The last three are one number a row [2P]: how probably it beats
    the other of its pair, whether the first of the samplers drew it, and whether its pair counts,
    of which `weigh` makes the weights of an update.
    """

    read: Any
    targets: Any
    completion_mask: Any
    token_weights: Any
    ref_logps: Any
    win_rates: Any
    firsts: Any
    loss_weights: Any


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the pairs given."""
    settings = experience.score_settings(config.whole, model)

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden, head = compact.hidden(model, params, batch.read), model.head(params)
        scored = (hidden, head, batch.targets, batch.completion_mask, settings)
        scores = logps.score_hidden(*scored)
        weights = pairwise.two(batch.loss_weights)[0]
        sides, further = compared(batch, scores.logps)
        of_pairs = pair_losses.pair_loss(config, sides, weights != 0, further)
        found = {
            **pair_losses.measures(config, sides, weights),
            **of_samples(config, scores, batch),
        }
        return jnp.sum(weights * of_pairs), jax.lax.stop_gradient(found)

    return objective


def compared(batch: Batch, new: Array) -> tuple[Sides, dict[str, Array]]:
    """What the losses take, of log-probabilities [2P, T]: sums, and tokens of single samples."""
    sums = jnp.sum(batch.token_weights * new, axis=1)
    ref_sums = jnp.sum(batch.token_weights * batch.ref_logps, axis=1)
    lengths = jnp.sum(batch.completion_mask, axis=1)
    firsts = pairwise.two(batch.firsts)[0]

    def sampled(values: Array, by_first: bool) -> Array:
        """Of each pair the row that the first, or the second, sampler drew."""
        pairs = values.reshape(-1, 2, *values.shape[1:])
        chosen = (firsts == by_first).reshape(-1, *(1,) * (values.ndim - 1))
        return jnp.where(chosen, pairs[:, 0], pairs[:, 1])

    return Sides(*map_two(sums, ref_sums, lengths)), {
        "win_rates": pairwise.two(batch.win_rates)[0],
        "second": sampled(jnp.sum(new, axis=1), False),
        "first_tokens": sampled(new, True),
        "ref_first_tokens": sampled(batch.ref_logps, True),
        "first_win_rates": sampled(batch.win_rates, True),
    }


def map_two(*rows: Array) -> Iterator[Array]:
    """Chosen and rejected of each."""
    return (side for each in rows for side in pairwise.two(each))


def of_samples(config: Config, scores: logps.TokenScores, batch: Batch) -> dict[str, Array]:
    """Sums over tokens, and over the policy's own samples, of dropped pairs too."""
    out = {
        "tokens": jnp.sum(batch.completion_mask, dtype=jnp.float32),
        "entropy": jnp.sum(scores.entropies),
    }
    if not config.measured() or config.drawn_by == "mixture":
        return out
    both = config.drawn_by == "policy"
    own = jnp.ones_like(batch.firsts) if both else batch.firsts
    kl = jnp.sum(scores.logps - batch.ref_logps, axis=1)
    return out | {
        "completions": jnp.sum(own, dtype=jnp.float32),
        "objective/kl": jnp.sum(jnp.where(own, kl, 0.0)),
    }


def weigh(batch: Batch) -> Batch:
    """Fixes the weights over the whole update: of a mean over its pairs, at both of their rows."""
    pairs = jnp.sum(batch.loss_weights) / 2
    return batch._replace(loss_weights=batch.loss_weights / jnp.maximum(pairs, 1.0))


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    objective = make_objective(config, policy.model)
    return setup.make_update(config, objective, optimizer, policy.trainable, weigh)


def summary(sums: list[dict[str, Array]]) -> dict[str, Array]:
    """What is logged of a rollout's updates: the mean loss, and ratios of sums over all."""
    if not sums:
        return {}
    total, count = jax.tree.map(lambda *each: sum(each), *sums), len(sums)
    out = {name: total.pop(name) / count for name in ("loss", "grad_norm")}
    tokens, pairs = total.pop("tokens"), total.pop("pairs")
    out["entropy"] = metrics.ratio(total.pop("entropy"), tokens)
    if "objective/kl" in total:
        kl, completions = total.pop("objective/kl"), total.pop("completions")
        out["objective/kl"] = metrics.ratio(kl, completions)
    return out | {name: metrics.ratio(value, pairs) for name, value in total.items()}


# The batch --------------------------------------------------------------------------------------


def make_batch(
    config: Config, labelled: Labels, rows: experience.Rows, ref_logps: np.ndarray
) -> Batch:
    """Rows of pairs with what the losses need."""
    rates = np.stack([labelled.win_rates, 1.0 - labelled.win_rates], axis=1)
    return Batch(
        read=experience.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        token_weights=pairwise.token_weights(rows.completion_mask, config.length_weight),
        ref_logps=ref_logps,
        win_rates=rates.ravel(),
        firsts=labelled.numbers.ravel() == 0,
        loss_weights=np.repeat(labelled.kept, 2).astype(np.float32),
    )


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        opened = course.open_parts(config, run, stack, config.judge)
        policy, data = opened.policy, opened.data
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.updates)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        reference = experience.starting_point(policy) if config.refers else None
        draw = samplers.make_draw(config.drawn_by, policy, reference)
        rollouts = ahead.Rollouts(config, opened, lambda _, count: data.take(count), draw)
        source = experience.Together({"prompts": data, "rollouts": rollouts})
        evaluation = accuracy.make_evaluation if config.judge is None else duels.make_evaluation
        start, state, here = course.begin(
            config, opened, state, policy.trainable, source, stack, evaluation
        )
        out, watch = here.out, here.watch
        update = make_update(config, policy, optimizer)
        score = experience.make_scores(policy.model, config.whole, config.microbatches)
        setup.tell_of_schedule(run.changed, config.optimizer, start, config.updates // config.steps)
        if start == 0:
            course.measure(here, 0, state.params)
        for step in range(start + 1, config.steps + 1):
            order = jax.random.fold_in(opened.key, step)
            found = rollouts.next(step, state.params, watch)
            labelled = labels.label(config, found)
            rows = experience.rows_of(labels.taken(found, labelled.numbers))
            counted = {**told.summary(found), **labels.counts(labelled), "epoch": data.epoch}
            if config.rollout.staleness:
                counted |= told.staleness(found)
            with watch.part("logps"):
                ref_logps = np.zeros(rows.targets.shape, np.float32)
                if config.measured():
                    frozen = train_step.merge(reference, state.params, policy.trainable)
                    ref_logps = np.asarray(score(frozen, rows))
            batch = make_batch(config, labelled, rows, ref_logps)
            sides = labels.sides_of(labelled, found.completions)
            said = zip(told.records(found, "train", config.samples), sides, strict=False)
            out.samples(step, [{**record, "side": side} for record, side in said])
            with watch.part("update"):
                sums, rate, skipped = [], schedule(state.step), 0
                for part in experience.passes(batch, config, order, policy.model):
                    if not part.loss_weights.any():
                        skipped += 1
                        continue
                    state, measured = update(state, part)
                    sums.append(measured)
                jax.block_until_ready(state.step)
            counted |= {"pairs/skipped_updates": float(skipped), "learning_rate": rate}
            setup.check(out.write(step, {**counted, **summary(sums)}))
            if course.end_step(config, here, step, state, state.params, found):
                return run.exit_code
        return course.finish(config, here, state.params)
