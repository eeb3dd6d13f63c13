"""Direct preference optimisation: from pairs of completions straight to the policy.

A pair's chosen completion shall become more likely against the rejected one, each measured by its
log-ratio to a frozen reference (DPO, arXiv 2305.18290). `loss` names the loss of a pair, or several
with weights (MPO, arXiv 2411.10442), as {dpo: 0.8, bco_pair: 0.2, nll: 1.0}:

    DPO, cDPO            dpo, label_smoothing      with no reference:
    IPO                  ipo_average, ipo (sums)       SimPO       simpo
    robust DPO           robust                        CPO         {cpo: 1, nll: 1}
    length-normalised    dpo_norm                      ORPO        {orpo: 0.1, nll: 1}
    DPOP                 dpop                          AlphaPO     alphapo
    APO                  apo_zero, apo_down            SLiC        {slic: 1, nll: 0.1}
    DPO + NLL (RPO)      {dpo: 1, nll: 1}
    RSO, EXO, NCA        hinge, exo, nca
    BCO, SPPO, AOT       bco_pair, sppo_hard, aot, aot_unpaired
    DiscoPOP             discopop

The reference is data: its sums over the completions are computed once, by the policy as it starts,
before the first update, and kept in a file (`reference.Cache`); no second model is held. Both sides
of a pair are branches of one tree, whose prompt is read once (`compact`).

Departures: 1. every completion's log-probability leaves out what both sides share, so that losses
which are not of the difference alone agree about it; 2. an update's loss is the mean over its
pairs, in all microbatches.

    jaxpost train configs/dpo_....yaml
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpost import batch as batches
from jaxpost import (
    checkpoint,
    compact,
    hub,
    logps,
    losses,
    metrics,
    optimizers,
    runs,
    train_step,
    writer,
)
from jaxpost import config as configs
from jaxpost.batch import PreferenceBatch
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import preferences
from jaxpost.data.preferences import PreferenceReport
from jaxpost.losses import implicit_rewards
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import experience, pairwise, reference, setup
from jaxpost.typing import Array, Params


class Sides(NamedTuple):
    """What the loss of a pair is given, [B] each; without a reference its two are 0."""

    chosen: Array
    rejected: Array
    ref_chosen: Array
    ref_rejected: Array
    chosen_lengths: Array
    rejected_lengths: Array


class Loss(NamedTuple):
    """A loss, which of `Sides` it takes, and which of the configuration's numbers."""

    function: Callable[..., Array]
    takes: tuple[str, ...]
    numbers: tuple[str, ...]


PAIR = ("chosen", "rejected")
FOUR = (*PAIR, "ref_chosen", "ref_rejected")
LENGTHS = ("chosen_lengths", "rejected_lengths")


def nll(chosen_logps: Array, chosen_lengths: Array) -> Array:
    """[B]: the mean over the chosen completion's tokens."""
    return losses.nll(chosen_logps) / jnp.maximum(chosen_lengths, 1)


LOSSES = {
    "dpo": Loss(losses.dpo, FOUR, ("beta", "label_smoothing")),
    "dpo_norm": Loss(losses.dpo_norm, (*FOUR, *LENGTHS), ("beta",)),
    "robust": Loss(losses.robust, FOUR, ("beta", "label_smoothing")),
    "hinge": Loss(losses.hinge, FOUR, ("beta",)),
    "ipo": Loss(losses.ipo, FOUR, ("beta",)),
    "ipo_average": Loss(losses.ipo_average, (*FOUR, *LENGTHS), ("beta",)),
    "exo": Loss(losses.exo, FOUR, ("beta", "label_smoothing")),
    "discopop": Loss(losses.discopop, FOUR, ("beta",)),
    "dpop": Loss(losses.dpop, FOUR, ("beta", "penalty")),
    "nca": Loss(losses.nca, FOUR, ("beta",)),
    "bco_pair": Loss(losses.bco_pair, FOUR, ("beta",)),
    "sppo_hard": Loss(losses.sppo_hard, FOUR, ("beta",)),
    "apo_zero": Loss(losses.apo_zero, FOUR, ("beta",)),
    "apo_down": Loss(losses.apo_down, FOUR, ("beta",)),
    "aot": Loss(losses.aot, FOUR, ("beta", "label_smoothing")),
    "aot_unpaired": Loss(losses.aot_unpaired, FOUR, ("beta", "label_smoothing")),
    "simpo": Loss(losses.simpo, (*PAIR, *LENGTHS), ("beta", "gamma_beta_ratio", "label_smoothing")),
    "alphapo": Loss(
        losses.alphapo, (*PAIR, *LENGTHS), ("beta", "gamma_beta_ratio", "label_smoothing", "alpha")
    ),
    "orpo": Loss(losses.orpo, (*PAIR, *LENGTHS), ()),
    "cpo": Loss(losses.cpo, PAIR, ("beta", "label_smoothing")),
    "slic": Loss(losses.slic, PAIR, ("delta",)),
    "nll": Loss(nll, ("chosen", "chosen_lengths"), ()),
}
SORTING = ("aot", "aot_unpaired")  # over all pairs of an update


@dataclasses.dataclass(frozen=True)
class Config:
    """Direct preference optimisation on pairs."""

    run: str = option(help="folder of the run: checkpoints, metrics, the trained model")
    model: setup.ModelConfig = option(help="the policy to train")
    data: preferences.PairConfig = option(help="pairs to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="linear"), "the optimizer"
    )
    steps: int = option(500, "how long to train", "updates", least=1)
    batch_size: int = option(32, "pairs of an update", "pairs", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    loss: str | dict[str, float] = option("dpo", "the loss of a pair, or several: {name: weight}")
    beta: float | None = option(
        None, "how strongly the policy is held to the reference; null: the loss's own", above=0
    )
    label_smoothing: float | None = option(
        None, "chance that a pair's label is wrong; null: the loss's own", least=0, below=0.5
    )
    gamma_beta_ratio: float | None = option(
        None, "simpo, alphapo: the margin wanted, over beta; null: 0.5", least=0
    )
    alpha: float | None = option(
        None, "alphapo: shape of the reward; null: 0.25", least=-10, most=10
    )
    penalty: float | None = option(None, "dpop: of a chosen one less likely; null: 50", least=0)
    delta: float | None = option(None, "slic: the margin wanted, in nats; null: 1", above=0)
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha_divergence"] = option(
        "reverse_kl", "from the reference: what a log-ratio stands for (f-DPO)"
    )
    length_weight: float = option(
        1.0, "weight of tokens beyond the shorter completion (LD-DPO)", least=0, most=1
    )
    weigh_by_policy: bool = option(
        False, "weigh a pair by how likely the policy is to write it (WPO)"
    )
    reference: str | None = option(
        None, "folder or hub id of the reference; null: the policy as it starts"
    )
    reference_cache: str | None = option(
        None, "folder for the reference's numbers, shared between runs; null: in the run's"
    )
    seed: int = option(0, "of everything random", least=0)
    eval: pairwise.EvalConfig = option(pairwise.EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.steps)
        train_step.check_microbatches(self.batch_size, self.microbatches)
        pairwise.check_names("loss", self.losses(), LOSSES)
        used = {number for name in self.losses() for number in LOSSES[name].numbers}
        for key, value in self.numbers().items():
            if key not in used:
                raise ValueError(f"{key} is {value}, which loss: {self.loss} does not look at")
        if self.microbatches > 1 and any(name in SORTING for name in self.losses()):
            raise ValueError("aot compares all pairs of an update; set microbatches to 1")
        if not self.measured():
            free = {
                "reference": self.reference is not None,
                "reference_cache": self.reference_cache is not None,
                "divergence": self.divergence != "reverse_kl",
            }
            for key in (key for key, given in free.items() if given):
                raise ValueError(f"loss: {self.loss} has no reference; remove {key}")

    def losses(self) -> dict[str, float]:
        """Their names and weights."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else dict(self.loss)

    def numbers(self) -> dict[str, float]:
        """The losses' own numbers, as far as they are given."""
        numbers = {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "gamma_beta_ratio": self.gamma_beta_ratio,
            "alpha": self.alpha,
            "penalty": self.penalty,
            "delta": self.delta,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def measured(self) -> bool:
        """Whether a loss looks at a reference."""
        return any("ref_chosen" in LOSSES[name].takes for name in self.losses())


class Batch(NamedTuple):
    """The sides of pairs as rows [2B, T]: chosen, rejected, chosen, ….

    `read` is what the model reads, as rows or in fewer (`compact`). `token_weights` are 0 outside
    the mask. The last two are one number a row [2B]: the reference's sum under those weights, and
    the weight of its pair in the update.
    """

    read: Any
    targets: Any
    completion_mask: Any
    token_weights: Any
    ref_logps: Any
    loss_weights: Any


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the pairs given."""

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        sums = pairwise.sums(model, params, batch)
        sides = Sides(
            *pairwise.two(sums),
            *pairwise.two(batch.ref_logps),
            *pairwise.two(jnp.sum(batch.completion_mask, axis=1)),
        )
        weights = pairwise.two(batch.loss_weights)[0]
        loss = jnp.sum(weights * pair_loss(config, sides))
        return loss, jax.lax.stop_gradient(measures(config, sides, weights))

    return objective


def pair_loss(config: Config, sides: Sides) -> Array:
    """[B]: the weighted losses of each pair."""
    given, total = diverging(config, sides)._asdict(), jnp.zeros(len(sides.chosen))
    for name, weight in config.losses().items():
        loss = LOSSES[name]
        numbers = {key: value for key, value in config.numbers().items() if key in loss.numbers}
        total += weight * loss.function(*(given[field] for field in loss.takes), **numbers)
    if config.weigh_by_policy:
        total *= implicit_rewards.pair_weights(
            sides.chosen, sides.rejected, sides.chosen_lengths, sides.rejected_lengths
        )
    return total


def diverging(config: Config, sides: Sides) -> Sides:
    """With another divergence its derivative takes the place of log π/π_ref (f-DPO)."""
    if config.divergence == "reverse_kl":
        return sides
    derivative = {
        "forward_kl": implicit_rewards.forward_kl,
        "jensen_shannon": implicit_rewards.jensen_shannon,
        "alpha_divergence": implicit_rewards.alpha_divergence,
    }[config.divergence]
    nought = jnp.zeros_like(sides.chosen)
    return sides._replace(
        chosen=derivative(sides.chosen, sides.ref_chosen),
        rejected=derivative(sides.rejected, sides.ref_rejected),
        ref_chosen=nought,
        ref_rejected=nought,
    )


def measures(config: Config, sides: Sides, weights: Array) -> dict[str, Array]:
    """Sums over the pairs; `summary` divides them by their number."""
    beta = 0.1 if config.beta is None else config.beta
    chosen = beta * (sides.chosen - sides.ref_chosen)
    rejected = beta * (sides.rejected - sides.ref_rejected)
    per_pair = {
        "pairs": jnp.ones_like(chosen),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": metrics.preference_accuracy(chosen, rejected),
        "logps/chosen": sides.chosen,
        "logps/rejected": sides.rejected,
    }
    return {name: jnp.sum(jnp.where(weights != 0, x, 0.0)) for name, x in per_pair.items()}


def summary(sums: dict[str, Array]) -> dict[str, Array]:
    """What is logged: sums over an update's pairs, divided once."""
    kept = ("loss", "grad_norm", "pairs")
    means = {n: metrics.ratio(x, sums["pairs"]) for n, x in sums.items() if n not in kept}
    return {"loss": sums["loss"], "grad_norm": sums["grad_norm"], **means}


def make_batch(config: Config, pairs: PreferenceBatch, ref_logps: np.ndarray) -> Batch:
    """Rows to read, with the weights of their tokens and pairs."""
    rows = batches.flat(pairs.tokens)
    return Batch(
        read=pairwise.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        token_weights=pairwise.token_weights(rows.completion_mask, config.length_weight),
        ref_logps=ref_logps,
        loss_weights=pairwise.weights_of(pairs),
    )


# The reference ----------------------------------------------------------------------------------


def make_reference(
    config: Config, policy: setup.Policy, folder: Path
) -> Callable[[PreferenceReport], np.ndarray]:
    """`report of a batch -> [2B]`, of all pairs that training and evaluation will ask for.

    They are scored now, while the policy is still as it starts (or by `config.reference`, which is
    let go of then), unless the file has them.
    """
    if not config.measured():
        return lambda report: np.zeros(2 * len(report.digests), np.float32)
    params, model = policy.params, policy.model
    if config.reference is not None:
        model, params = hub.load_model(config.reference, dtype=config.model.dtype)
    cache_folder = Path(config.reference_cache or folder / "reference")
    name = reference.fingerprint(params, model.config.compute_dtype, config.length_weight)
    score = make_score(config, model)
    cache = reference.Cache(cache_folder / f"{name}.npz", lambda pairs: score(params, pairs))
    with contextlib.closing(pairwise.data(config, policy.tokenizer, model)) as data:
        whole = config.steps * next(data)[1].epoch >= 1.0
    with contextlib.closing(pairwise.data(config, policy.tokenizer, model, once=whole)) as data:
        cache.fill(itertools.islice(data, None if whole else config.steps))
    if config.data.eval is not None:
        with contextlib.closing(pairwise.held_out(config, policy.tokenizer, model)) as data:
            cache.fill(data)
    return cache


def make_score(config: Config, model: Model) -> Callable[[Params, PreferenceBatch], np.ndarray]:
    """`(params, pairs) -> [2B]`: sums of the completions' log-probabilities."""
    settings = pairwise.score_settings(model)

    def scores(params: Params, part: experience.Read) -> Array:
        hidden = compact.hidden(model, params, part.read)
        head = model.head(params)
        return logps.score_hidden(hidden, head, part.targets, part.completion_mask, settings).logps

    in_parts = experience.in_parts(scores, model, config.microbatches)

    def score(params: Params, pairs: PreferenceBatch) -> np.ndarray:
        rows = batches.flat(pairs.tokens)
        weights = pairwise.token_weights(rows.completion_mask, config.length_weight)
        return np.sum(weights * np.asarray(in_parts(params, rows)), axis=1)

    return score


# The loop ---------------------------------------------------------------------------------------


def make_update(
    config: Config, policy: setup.Policy, optimizer: optax.GradientTransformation
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    step = train_step.make_train_step(
        make_objective(config, policy.model),
        optimizer,
        microbatches=config.microbatches,
        trainable=policy.trainable,
    )
    return jax.jit(step, donate_argnums=0)


def make_evaluation(
    config: Config,
    policy: setup.Policy,
    ref_logps: Callable[[PreferenceReport], np.ndarray],
) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` over the held-out pairs, each of which counts once."""
    if config.data.eval is None:
        return lambda params: {}
    objective = make_objective(config, policy.model)

    @jax.jit
    def measure(params: Params, batch: Batch) -> dict[str, Array]:
        whole = jax.tree.map(lambda x: x[0], train_step.split(batch, 1))
        loss, found = objective(params, whole)
        return {**found, "loss": loss}

    def run(params: Params) -> dict[str, float]:
        total: dict[str, Any] = {}
        with contextlib.closing(pairwise.held_out(config, policy.tokenizer, policy.model)) as data:
            for pairs, report in data:
                batch = make_batch(config, pairs, ref_logps(report))
                real = np.repeat(pairs.weights > 0, 2).astype(np.float32)
                _, batch = experience.laid_out(batch._replace(loss_weights=real), 1, policy.model)
                found = measure(params, batch)
                total = {name: total.get(name, 0.0) + x for name, x in found.items()}
        return pairwise.means(total)

    return run


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
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        ref_logps = make_reference(config, policy, run.folder)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        data = stack.enter_context(
            contextlib.closing(pairwise.data(config, policy.tokenizer, policy.model))
        )
        saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
        start, state, counters = setup.resume(run, saver, state, policy.trainable, data)
        print(*data.summary, sep="\n")
        out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
        update = make_update(config, policy, optimizer)
        evaluate = make_evaluation(config, policy, ref_logps)
        meter = setup.make_meter(policy, counters)

        setup.tell_of_schedule(run.changed, config.optimizer, start)
        if start == 0:
            with meter.pause():
                out.write(0, evaluate(state.params))
        for step in range(start + 1, config.steps + 1):
            pairs, report = next(data)
            batch = make_batch(config, pairs, ref_logps(report))
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            rate = schedule(state.step)
            state, measured = update(state, batch)
            measured = {**summary(measured), "learning_rate": rate, **report.metrics()}
            setup.check(out.write(step, measured))
            stopping, scores = run.should_stop(step), {}
            evaluating = config.eval.due(step, config.steps)
            saving = saver.due(step) or stopping or step == config.steps
            out.write(step, meter.update(report.tokens, report.examples, measured))
            with meter.pause(measured if evaluating or saving else None):
                if evaluating:
                    scores = evaluate(state.params)
                    out.write(step, scores)
                if saving:
                    setup.check(out.flush())
                    setup.save(saver, step, state, policy.trainable, data, meter, resolved, scores)
                saver.check()
            if stopping:
                return run.exit_code
        saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
