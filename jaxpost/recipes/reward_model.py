"""A reward model: which of two completions people, or a checker, would prefer.

A linear head reads a scalar r from the state after a conversation's last token; the loss of a pair
is −log σ(r_chosen − r_rejected) (Bradley–Terry, arXiv 2203.02155, eq. 1). `margin: true` asks for
the data's margin between the two (Llama 2, arXiv 2307.09288, §3.2.2); `centering` pulls the sum of
a pair's rewards to 0, so that rewards of different prompts share their zero.

Departures: 1. the head begins at 0 and has no bias, as a constant cancels in every pair; 2. the
prompt that both sides share is read once (`compact`).

    jaxpost train configs/reward_model_....yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable
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
from jaxpost.models import heads
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import experience, pairwise, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """A reward model from pairs."""

    run: str = option(help="folder of the run: checkpoints, metrics, the reward model")
    model: setup.ModelConfig = option(help="the model that the reward model starts from")
    data: preferences.PairConfig = option(help="pairs to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-5, schedule="linear"), "the optimizer"
    )
    steps: int = option(500, "how long to train", "updates", least=1)
    batch_size: int = option(32, "pairs of an update", "pairs", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    margin: bool = option(False, "ask for the data's margin between the rewards of a pair")
    centering: float = option(
        0.0, "weight of the squared sum of a pair's rewards; 0.01 is usual", least=0
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


def with_head(policy: setup.Policy) -> tuple[Params, Any]:
    """(`{"model": …, "head": …}`, which of it is trained)."""
    params = {"model": policy.params, "head": heads.reward_head(policy.model.config.width)}
    if policy.trainable is None:
        return params, None
    return params, {"model": policy.trainable, "head": jax.tree.map(lambda _: True, params["head"])}


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


def summary(sums: dict[str, Array]) -> dict[str, Array]:
    """What is logged: sums over an update's pairs, divided once."""
    kept = ("loss", "grad_norm", "pairs")
    means = {n: metrics.ratio(x, sums["pairs"]) for n, x in sums.items() if n not in kept}
    return {"loss": sums["loss"], "grad_norm": sums["grad_norm"], **means}


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


def make_update(
    config: Config, model: Model, optimizer: optax.GradientTransformation, trainable: Any
) -> Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated."""
    step = train_step.make_train_step(
        make_objective(config, model),
        optimizer,
        microbatches=config.microbatches,
        trainable=trainable,
    )
    return jax.jit(step, donate_argnums=0)


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
        params, trainable = with_head(policy)
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        state = train_step.init_state(params, optimizer, trainable=trainable)
        data = stack.enter_context(
            contextlib.closing(pairwise.data(config, policy.tokenizer, policy.model, end=True))
        )
        saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
        start, state, counters = setup.resume(run, saver, state, trainable, data)
        print(*data.summary, sep="\n")
        out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
        update = make_update(config, policy.model, optimizer, trainable)
        evaluate = make_evaluation(config, policy)
        meter = setup.make_meter(policy, counters)

        setup.tell_of_schedule(run.changed, config.optimizer, start)
        if start == 0:
            with meter.pause():
                out.write(0, evaluate(state.params))
        for step in range(start + 1, config.steps + 1):
            pairs, report = next(data)
            batch = make_batch(config, pairs)
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
                    setup.save(saver, step, state, trainable, data, meter, resolved, scores)
                saver.check()
            if stopping:
                return run.exit_code
        saver.wait()
        model, params = policy.model, state.params["model"]
        if policy.trainable is not None:
            model, params = hub.merge(model, params)
        hub.save_reward_model(run.folder / "model", model, params, state.params["head"])
        run.finish(config.steps)
        return run.exit_code
