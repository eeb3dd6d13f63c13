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
from typing import Any, NamedTuple

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
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import experience, pair_losses, pairwise, reference, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config(pair_losses.LossConfig):
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
        own = {"reference": self.reference, "reference_cache": self.reference_cache}
        self.check_losses(self.microbatches, {key: own[key] is not None for key in own})


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
        sides = pair_losses.Sides(
            *pairwise.two(sums),
            *pairwise.two(batch.ref_logps),
            *pairwise.two(jnp.sum(batch.completion_mask, axis=1)),
        )
        weights = pairwise.two(batch.loss_weights)[0]
        loss = jnp.sum(weights * pair_losses.pair_loss(config, sides))
        return loss, jax.lax.stop_gradient(pair_losses.measures(config, sides, weights))

    return objective


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
