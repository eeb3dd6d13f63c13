"""What the recipes share that learn to say whether something is right: batches, measures, the loop.

A verdict is a logit z at a place of a row, σ(z) the probability that what ends there is right, and
its label the truth, from 0 to 1; right is what has a label of at least ½.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import metrics, optimizers, runs, train_step
from jaxpost.batch import StepBatch
from jaxpost.models.model import Model
from jaxpost.recipes import experience, pairwise, setup
from jaxpost.typing import Array, Params


class Batch(NamedTuple):
    """Rows with places that are judged.

    `read` is what the model reads, as rows or in fewer (`compact`). The others are [B, T]: the
    places, their labels, and the weights of a mean over all places of the update.
    """

    read: Any
    completion_mask: Any
    labels: Any
    loss_weights: Any


class Verdicts(NamedTuple):
    """[B, T] at the places, 0 elsewhere: z, and the loss of each."""

    logits: Array
    losses: Array


Judge = Callable[[Params, Batch], Verdicts]


def make_batch(rows: StepBatch) -> Batch:
    """Rows to read; the weights are fixed over all of them."""
    return Batch(
        read=experience.plain(rows),
        completion_mask=rows.step_mask,
        labels=rows.labels,
        loss_weights=pairwise.mean_weights(rows.step_mask),
    )


def make_objective(judge: Judge) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the places given."""

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        verdicts = judge(params, batch)
        mask, labels = batch.completion_mask, batch.labels
        told = {
            "places": jnp.ones_like(labels),
            "accuracy": agrees(verdicts.logits, labels),
            "margin": margins(verdicts.logits, labels),
            "mean_label": labels,
            "mean_probability": jax.nn.sigmoid(verdicts.logits),
        }
        sums = {name: jnp.sum(jnp.where(mask, x, 0.0)) for name, x in told.items()}
        loss = jnp.sum(batch.loss_weights * verdicts.losses)
        return loss, jax.lax.stop_gradient(sums)

    return objective


def agrees(logits: Any, labels: Any) -> Any:
    """Whether what is said to be right is so, and what is not, is not; a tie says no."""
    return (logits > 0) == (labels >= 0.5)


def margins(logits: Any, labels: Any) -> Any:
    """How far z lies on the side of the truth: (2y − 1) z."""
    return (2.0 * labels - 1.0) * logits


def summary(sums: dict[str, Array]) -> dict[str, Array]:
    """What is logged: sums over an update's places, divided once."""
    kept = ("loss", "grad_norm", "places")
    means = {n: metrics.ratio(x, sums["places"]) for n, x in sums.items() if n not in kept}
    return {**{name: sums[name] for name in kept}, **means}


# Held-out measures ------------------------------------------------------------------------------


class Found(NamedTuple):
    """All that was judged, on the host: [n] of the places, in the order of the data.

    `solutions` numbers the rows of text that they are of.
    """

    logits: np.ndarray
    losses: np.ndarray
    labels: np.ndarray
    solutions: np.ndarray


Measure = Callable[[Found], dict[str, float]]


def make_evaluation(
    config: Any,
    policy: setup.Policy,
    judge: Judge,
    read: Callable[..., Any],
    measures: tuple[Measure, ...],
) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` over all places of `data.eval`, whose rows `read` makes."""
    if config.data.eval is None:
        return lambda params: {}

    @jax.jit
    def score(params: Params, batch: Batch) -> Verdicts:
        return judge(params, jax.tree.map(lambda x: x[0], train_step.split(batch, 1)))

    def run(params: Params) -> dict[str, float]:
        held_out = pairwise.held_out(config, policy.tokenizer, policy.model, read=read)
        with contextlib.closing(held_out) as data:
            parts = list(judged(lambda batch: score(params, batch), data, policy.model))
        if not parts:
            raise ValueError("data.eval holds nothing to measure on")
        whole = Found(*(np.concatenate(field) for field in zip(*parts, strict=True)))
        found = {name: value for measure in measures for name, value in measure(whole).items()}
        return {f"eval/{name}": value for name, value in found.items()}

    return run


def judged(
    score: Callable[[Batch], Verdicts], data: Iterator[tuple[StepBatch, Any]], model: Model
) -> Iterator[Found]:
    """What each batch of held-out rows becomes."""
    before = 0
    for rows, _ in data:
        order, batch = experience.laid_out(make_batch(rows), 1, model)
        back = np.argsort(order)
        mask = np.asarray(rows.step_mask)
        logits, losses = (np.asarray(field)[back][mask] for field in score(batch))
        yield Found(logits, losses, rows.labels[mask], before + np.nonzero(mask)[0])
        before += len(mask)


def place_measures(found: Found) -> dict[str, float]:
    """Loss, accuracy, calibration and means, each place counting once.

    `majority` is the accuracy of saying always what is more often so.
    """
    right = float(np.mean(found.labels >= 0.5))
    everywhere = jnp.ones(found.labels.shape, bool)
    bins = metrics.reliability(jnp.asarray(found.logits), jnp.asarray(found.labels), everywhere)
    return {
        "places": float(len(found.labels)),
        "loss": float(np.mean(found.losses)),
        "accuracy": float(np.mean(agrees(found.logits, found.labels))),
        "majority": max(right, 1.0 - right),
        "margin": float(np.mean(margins(found.logits, found.labels))),
        "calibration_error": float(metrics.calibration_error(bins)),
        "mean_label": float(np.mean(found.labels)),
        "mean_probability": float(np.mean(0.5 * (1.0 + np.tanh(0.5 * found.logits)))),
    }


# The loop ---------------------------------------------------------------------------------------


class Learner(NamedTuple):
    """What a recipe of verdicts brings.

    Attributes:
      params, trainable: what is trained, and which of it.
      objective: of its verdicts.
      read: makes the rows, a function of `preferences`.
      evaluate: measures of held-out rows.
    """

    policy: setup.Policy
    params: Params
    trainable: Any
    objective: train_step.Objective
    read: Callable[..., Any]
    evaluate: Callable[[Params], dict[str, float]]


def learn(config: Any, run: runs.Run, learner: Learner, stack: contextlib.ExitStack) -> Any:
    """The trained parameters once all updates are done; None where the run is to stop before."""
    policy, trainable = learner.policy, learner.trainable
    optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
    state = train_step.init_state(learner.params, optimizer, trainable=trainable)
    data = pairwise.data(config, policy.tokenizer, policy.model, read=learner.read)
    stack.enter_context(contextlib.closing(data))
    start, state, here = pairwise.begin(config, run, policy, state, trainable, data, stack)
    print(*data.summary, sep="\n")
    update = setup.make_update(config, learner.objective, optimizer, trainable)
    if start == 0:
        with here.meter.pause():
            here.out.write(0, learner.evaluate(state.params))
    for step in range(start + 1, config.steps + 1):
        rows, report = next(data)
        _, batch = experience.laid_out(make_batch(rows), config.microbatches, policy.model)
        rate = schedule(state.step)
        state, sums = update(state, batch)
        measured = {**summary(sums), "learning_rate": rate, **report.metrics()}
        if pairwise.end_step(config, here, step, state, report, measured, learner.evaluate):
            return None
    here.saver.wait()
    return state.params
