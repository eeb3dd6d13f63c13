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

    jaxpost train configs/dpo_sums.yaml
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import batch as batches
from jaxpost import optimizers, train_step
from jaxpost.batch import PreferenceBatch
from jaxpost.data import preferences
from jaxpost.data.preferences import PreferenceReport
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import course, experience, pair_losses, pairwise, reference, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config(pair_losses.LossConfig, reference.ReferenceConfig, pairwise.RunConfig):
    """Direct preference optimisation on pairs."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: preferences.PairConfig = option(help="pairs to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "pairs of an update", "pairs", least=1)

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
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
    cache, score = reference.opened(
        config, policy, folder, functools.partial(make_score, config), config.length_weight
    )
    open_data = functools.partial(pairwise.data, config, policy.tokenizer, policy.model)
    with contextlib.closing(open_data()) as data:
        whole = config.steps * next(data)[1].epoch >= 1.0
    with contextlib.closing(open_data(once=whole)) as data:
        cache.fill(digested(itertools.islice(data, None if whole else config.steps)), score)
    if config.data.eval is not None:
        with contextlib.closing(pairwise.held_out(config, policy.tokenizer, policy.model)) as data:
            cache.fill(digested(data), score)
    return lambda report: cache(report.digests)


def digested(
    found: Iterable[tuple[PreferenceBatch, PreferenceReport]],
) -> Iterator[tuple[PreferenceBatch, Sequence[str]]]:
    """Batches with the digests of their pairs."""
    return ((pairs, report.digests) for pairs, report in found)


def make_score(config: Config, model: Model) -> Callable[[Params, PreferenceBatch], np.ndarray]:
    """`(params, pairs) -> [2B]`: sums of the completions' log-probabilities."""
    in_parts = pairwise.make_token_logps(model, config.microbatches)

    def score(params: Params, pairs: PreferenceBatch) -> np.ndarray:
        rows = batches.flat(pairs.tokens)
        weights = pairwise.token_weights(rows.completion_mask, config.length_weight)
        return np.sum(weights * np.asarray(in_parts(params, rows)), axis=1)

    return score


# The loop ---------------------------------------------------------------------------------------


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
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        ref_logps = make_reference(config, policy, run.folder)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        data = stack.enter_context(
            contextlib.closing(pairwise.data(config, policy.tokenizer, policy.model))
        )
        start, state, here = pairwise.begin(
            config, run, policy, state, policy.trainable, data, stack
        )
        print(*data.summary, sep="\n")
        objective = make_objective(config, policy.model)
        update = setup.make_update(config, objective, optimizer, policy.trainable)
        evaluate = make_evaluation(config, policy, ref_logps)
        if start == 0:
            with here.meter.pause():
                here.out.write(0, evaluate(state.params))
        for step in range(start + 1, config.steps + 1):
            pairs, report = next(data)
            batch = make_batch(config, pairs, ref_logps(report))
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            rate = schedule(state.step)
            state, measured = update(state, batch)
            measured = {**pairwise.summary(measured), "learning_rate": rate, **report.metrics()}
            if pairwise.end_step(config, here, step, state, report, measured, evaluate):
                return run.exit_code
        here.saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
