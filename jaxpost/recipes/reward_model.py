"""A reward model: which of two completions people, or a checker, would prefer.

A linear head reads a scalar r from the state after a conversation's last token; the loss of a pair
is −log σ(r_chosen − r_rejected) (Bradley–Terry, arXiv 2203.02155, eq. 1). `margin: true` asks for
the data's margin between the two (Llama 2, arXiv 2307.09288, §3.2.2); `centering` pulls the sum of
a pair's rewards to 0, so that rewards of different prompts share their zero.

Departures: 1. the head begins at 0 and has no bias, as a constant cancels in every pair; 2. the
prompt that both sides share is read once (`compact`).

    jaxpost train configs/reward_model_sums.yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import batch as batches
from jaxpost import compact, hub, losses, metrics, optimizers, train_step
from jaxpost.batch import PreferenceBatch
from jaxpost.data import preferences
from jaxpost.models import heads
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import course, experience, pairwise, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config(pairwise.RunConfig):
    """A reward model from pairs."""

    run: str = option(help="folder of the run: checkpoints, metrics, the reward model")
    model: setup.ModelConfig = option(help="the model that the reward model starts from")
    data: preferences.PairConfig = option(help="pairs to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-5, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "pairs of an update", "pairs", least=1)
    margin: bool = option(False, "ask for the data's margin between the rewards of a pair")
    centering: float = option(
        0.0, "weight of the squared sum of a pair's rewards; 0.01 is usual", least=0
    )

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)


class Batch(NamedTuple):
    """The sides of pairs as rows [2B, T]: chosen, rejected, chosen, ….

    `read` is what the model reads; `completion_mask` are the places whose states are kept, and
    `last` [2B] that of the last token. `margins` and `loss_weights` [2B] are those of the pair.
    """

    read: Any
    completion_mask: Any
    last: Any
    margins: Any
    loss_weights: Any


def rewards_of(model: Model, params: Params, batch: Any) -> Array:
    """[2B]: the reward of each row, read after its last token."""
    hidden = compact.hidden(model, params["model"], batch.read)
    last = jnp.take_along_axis(hidden, batch.last[:, None, None], axis=1)[:, 0]
    return heads.reward(params["head"], last)


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the pairs given."""

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        chosen, rejected = pairwise.two(rewards_of(model, params, batch))
        margins, weights = pairwise.two(batch.margins)[0], pairwise.two(batch.loss_weights)[0]
        loss = losses.bradley_terry(chosen, rejected, margin=margins)
        if config.centering:
            loss += config.centering * losses.reward_centering(chosen, rejected)
        found = measures(chosen, rejected, weights)
        return jnp.sum(weights * loss), jax.lax.stop_gradient(found)

    return objective


def measures(chosen: Array, rejected: Array, weights: Array) -> dict[str, Array]:
    """Sums over the pairs; `summary` divides them by their number."""
    per_pair = {
        "pairs": jnp.ones_like(chosen),
        "accuracy": metrics.preference_accuracy(chosen, rejected),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }
    return {name: jnp.sum(jnp.where(weights != 0, x, 0.0)) for name, x in per_pair.items()}


def make_batch(config: Config, pairs: PreferenceBatch) -> Batch:
    """Rows that are read to their ends (`read_end`)."""
    rows, last = batches.flat(pairs.tokens), pairs.ends.reshape(-1)
    margins = pairs.margins if config.margin else np.zeros_like(pairs.margins)
    at_end = np.arange(rows.inputs.shape[1]) == last[:, None]
    return Batch(
        read=pairwise.plain(rows),
        completion_mask=rows.completion_mask | at_end,
        last=last,
        margins=np.repeat(margins, 2),
        loss_weights=pairwise.weights_of(pairs),
    )


def make_evaluation(config: Config, policy: setup.Policy) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` over the held-out pairs, with the calibration of the preference."""
    if config.data.eval is None:
        return lambda params: {}

    @jax.jit
    def measure(params: Params, batch: Batch) -> dict[str, Array]:
        whole = jax.tree.map(lambda x: x[0], train_step.split(batch, 1))
        chosen, rejected = pairwise.two(rewards_of(policy.model, params, whole))
        real = pairwise.two(whole.loss_weights)[0]
        loss = jnp.sum(real * losses.bradley_terry(chosen, rejected))
        bins = metrics.calibration(chosen - rejected, real != 0)
        return {**measures(chosen, rejected, real), "loss": loss, "bins": bins}

    def run(params: Params) -> dict[str, float]:
        total: dict[str, Any] = {}
        with contextlib.closing(
            pairwise.held_out(config, policy.tokenizer, policy.model, end=True)
        ) as data:
            for pairs, _ in data:
                real = np.repeat(pairs.weights > 0, 2).astype(np.float32)
                batch = make_batch(config, pairs)._replace(loss_weights=real)
                _, batch = experience.laid_out(batch, 1, policy.model)
                found = measure(params, batch)
                total = {name: total.get(name, 0.0) + x for name, x in found.items()}
        error = metrics.calibration_error(total.pop("bins"))
        return {**pairwise.means(total), "eval/calibration_error": float(error)}

    return run


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        head = heads.reward_head(policy.model.config.width)
        params, trainable = pairwise.with_head(policy, head)
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        state = train_step.init_state(params, optimizer, trainable=trainable)
        data = stack.enter_context(
            contextlib.closing(pairwise.data(config, policy.tokenizer, policy.model, end=True))
        )
        start, state, here = pairwise.begin(config, run, policy, state, trainable, data, stack)
        print(*data.summary, sep="\n")
        objective = make_objective(config, policy.model)
        update = setup.make_update(config, objective, optimizer, trainable)
        evaluate = make_evaluation(config, policy)
        if start == 0:
            with here.meter.pause():
                here.out.write(0, evaluate(state.params))
        for step in range(start + 1, config.steps + 1):
            pairs, report = next(data)
            batch = make_batch(config, pairs)
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            rate = schedule(state.step)
            state, measured = update(state, batch)
            measured = {**pairwise.summary(measured), "learning_rate": rate, **report.metrics()}
            if pairwise.end_step(config, here, step, state, report, measured, evaluate):
                return run.exit_code
        here.saver.wait()
        model, params = policy.model, state.params["model"]
        if policy.trainable is not None:
            model, params = hub.merge(model, params)
        hub.save_reward_model(run.folder / "model", model, params, state.params["head"])
        run.finish(config.steps)
        return run.exit_code
