"""A process reward model: which steps of a solution are right.

A linear head reads a logit z from the state after a step's last token, its separator; σ(z) is the
probability that the step is right, and the loss of an update the mean over its labelled steps of
−y log σ(z) − (1 − y) log(1 − σ(z)) (Math-Shepherd, arXiv 2312.08935, eq. 2; there a sum). Labels y
are truth values, or the part of completions begun after the step that were right (`jaxpost label`);
a step whose label is null is read, and not judged.

Departures: 1. the two classes of TRL's head are one logit, their difference, which is the same
distribution; the exported head has two; 2. head and bias begin at 0.

    jaxpost train CONFIG.yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import compact, hub, losses, optimizers, train_step
from jaxpost.data import preferences
from jaxpost.hub import process_reward_models
from jaxpost.models import heads
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import course, evaluation, pairwise, setup, verdicts
from jaxpost.typing import Params


@dataclasses.dataclass(frozen=True)
class Config(pairwise.RunConfig):
    """A process reward model from solutions whose steps are labelled."""

    run: str = option(help="folder of the run: checkpoints, metrics, the process reward model")
    model: setup.ModelConfig = option(help="the model that it starts from")
    data: preferences.StepConfig = option(help="solutions to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-5, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "solutions of an update", "solutions", least=1)

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
        if self.data.eval is None:
            evaluation.refuse_unused(self.eval)


def make_judge(model: Model) -> verdicts.Judge:
    """`(params, batch) -> verdicts` of the steps."""

    def judge(params: Params, batch: verdicts.Batch) -> verdicts.Verdicts:
        hidden = compact.hidden(model, params["model"], batch.read)
        logits = jnp.where(batch.completion_mask, heads.read(params["head"], hidden), 0.0)
        each = losses.value_bce(logits, batch.labels)
        return verdicts.Verdicts(logits, jnp.where(batch.completion_mask, each, 0.0))

    return judge


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the steps given."""
    return verdicts.make_objective(make_judge(model))


def make_evaluation(config: Config, policy: setup.Policy) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` of the steps of `data.eval`, and of its solutions."""
    measures = (verdicts.place_measures, solution_measures)
    judge = make_judge(policy.model)
    return verdicts.make_evaluation(config, policy, judge, preferences.steps, measures)


def solution_measures(found: verdicts.Found) -> dict[str, float]:
    """Whether the first wrong step is found, of solutions that have one; else that there is none.

    Their harmonic mean is ProcessBench's F1 (arXiv 2412.06559); it needs solutions of both kinds.
    """
    said = first_wrong(found.logits <= 0, found.solutions)
    truth = first_wrong(found.labels < 0.5, found.solutions)
    wrong, same = truth >= 0, said == truth
    kinds = {"first_error_accuracy": wrong, "right_solution_accuracy": ~wrong}
    out = {name: float(np.mean(same[kind])) for name, kind in kinds.items() if kind.any()}
    if len(out) == 2:
        first, second = out.values()
        out["f1"] = 2 * first * second / (first + second) if first + second else 0.0
    return {"solution_accuracy": float(np.mean(same)), **out}


def first_wrong(wrong: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """[solutions]: the number of the first wrong step among those judged; -1 where none is."""
    _, starts = np.unique(solutions, return_index=True)
    parts = np.split(wrong, starts[1:])
    return np.array([int(np.argmax(part)) if part.any() else -1 for part in parts])


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        process_reward_models.check_family(policy.model.card.hf_config)
        params, trainable = pairwise.with_head(policy, heads.zero_head(policy.model.config.width))
        learner = verdicts.Learner(
            policy,
            params,
            trainable,
            make_objective(config, policy.model),
            preferences.steps,
            make_evaluation(config, policy),
        )
        params = verdicts.learn(config, run, learner, stack)
        if params is not None:
            export(config, run.folder, policy, params)
            run.finish(config.steps)
        return run.exit_code


def export(config: Config, folder: Path, policy: setup.Policy, params: Params) -> None:
    """Writes the process reward model to `model/`, with what ends its steps."""
    model, merged = policy.model, params["model"]
    if policy.trainable is not None:
        model, merged = hub.merge(model, merged)
    separator = config.data.step_separator
    hub.save_process_reward_model(
        folder / "model", model, merged, params["head"], step_separator=separator
    )
