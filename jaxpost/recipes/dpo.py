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
before the first update, and kept in a file (`reference.Cache`); no second model is held. Where
`reference_update` lets it follow the policy (TR-DPO, arXiv 2404.09656), a copy is held, which
computes them for each update (`moving_reference`). Both sides of a pair are branches of one tree,
whose prompt is read once (`compact`).

Departures: 1. every completion's log-probability leaves out what both sides share, so that losses
which are not of the difference alone agree about it; 2. an update's loss is the mean over its
pairs, in all microbatches.

    jaxpost train configs/dpo_sums.yaml
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import batch as batches
from jaxpost import optimizers, train_step
from jaxpost.batch import PreferenceBatch
from jaxpost.data import preferences
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import (
    course,
    experience,
    moving_reference,
    pair_losses,
    pair_reference,
    pairwise,
    setup,
)
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config(pair_losses.LossConfig, moving_reference.ReferenceConfig, pairwise.RunConfig):
    """Direct preference optimisation on pairs."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: preferences.PairConfig = option(help="pairs to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "pairs of an update", "pairs", least=1)

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
        self.check_losses(self.microbatches, self.of_reference())
        self.check_reference(self.model, self.steps)


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
        sides = pair_losses.sides(batch, pairwise.sums(model, params, batch))
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


# The loop ---------------------------------------------------------------------------------------


def asked(config: Config, policy: setup.Policy) -> Iterator[Any]:
    """The (pairs, report) that training and evaluation will ask the reference for."""
    open_data = functools.partial(pairwise.data, config, policy.tokenizer, policy.model)
    yield from pair_reference.to_come(open_data, config.steps)
    if config.data.eval is not None:
        yield from held_out(config, policy)


def held_out(config: Config, policy: setup.Policy) -> Iterator[Any]:
    """The (pairs, report) of `data.eval`."""
    with contextlib.closing(pairwise.held_out(config, policy.tokenizer, policy.model)) as data:
        yield from data


def make_evaluation(
    config: Config, policy: setup.Policy
) -> Callable[[pair_reference.Known, Params], dict[str, float]]:
    """`(the reference's numbers, params) -> metrics` over the held-out pairs, each once."""
    measure = pairwise.make_measure(make_objective(config, policy.model), policy.model)

    def run(ref_logps: pair_reference.Known, params: Params) -> dict[str, float]:
        if config.data.eval is None:
            return {}
        found = (
            make_batch(config, pairs, ref_logps(pairs, report))._replace(
                loss_weights=pairwise.counted(pairs)
            )
            for pairs, report in held_out(config, policy)
        )
        return pairwise.means(measure(params, found))

    return run


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        optimizer = moving_reference.following(optimizer, config.reference_update)
        refer = pair_reference.make(config, policy, run.folder, lambda: asked(config, policy))
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        state = moving_reference.started(config, policy, state)
        data = stack.enter_context(
            contextlib.closing(pairwise.data(config, policy.tokenizer, policy.model))
        )
        start, state, here = pairwise.begin(
            config, run, policy, state, policy.trainable, data, stack
        )
        print(*data.summary, sep="\n")
        objective = make_objective(config, policy.model)
        update = setup.make_update(config, objective, optimizer, policy.trainable)
        evaluate = make_evaluation(config, policy)
        if start == 0:
            with here.meter.pause():
                here.out.write(0, evaluate(refer(state), state.params))
        for step in range(start + 1, config.steps + 1):
            pairs, report = next(data)
            batch = make_batch(config, pairs, refer(state)(pairs, report))
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            rate = schedule(state.step)
            state, measured = update(state, batch)
            measured = {**pairwise.summary(measured), "learning_rate": rate, **report.metrics()}
            measure = functools.partial(evaluate, refer(state))
            if pairwise.end_step(config, here, step, state, report, measured, measure):
                return run.exit_code
        here.saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
