"""What the recipes on judged completions share: rows, sums, held-out measures, begin and end."""

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import checkpoint, compact, logps, metrics, optimizers, runs, train_step, writer
from jaxpost import config as configs
from jaxpost.batch import PreferenceBatch, TokenBatch
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import preferences
from jaxpost.data.stream import DataReport
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.losses import implicit_rewards
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import experience, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and how much of `data.eval` is measured."""

    every: int = option(
        0, "evaluate after this many updates; 0 evaluates at start and end", "updates", least=0
    )
    rows: int | None = option(
        None, "use only the first so many rows; null uses all", "rows", least=1
    )

    def __post_init__(self):
        check_ranges(self, "eval.")

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this update: at the start, every so often, at the end."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys of a run, in every recipe on judged completions alike."""

    run: str = option(help="folder of the run: checkpoints, metrics, the trained model")
    steps: int = option(500, "how long to train", "updates", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    seed: int = option(0, "of everything random", least=0)
    eval: EvalConfig = option(EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    def check_run(self, batch_size: int, optimizer: optimizers.OptimizerConfig) -> None:
        """Raises ValueError for numbers out of range, or at odds with each other."""
        check_ranges(self)
        optimizers.check_warmup(optimizer, self.steps)
        train_step.check_microbatches(batch_size, self.microbatches)


def two(values: Array) -> tuple[Array, Array]:
    """[2B], of the rows → [B] of the chosen, [B] of the rejected."""
    pairs = values.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def score_settings(model: Model) -> logps.Settings:
    """Of the distribution as the model gives it."""
    return logps.Settings(1.0, None, None, None, model.config.final_softcap, logps.CHUNK_TOKENS)


def weights_of(pairs: PreferenceBatch) -> np.ndarray:
    """[2B]: of a mean over the update's pairs, at both of their rows."""
    return np.repeat(mean_weights(pairs.weights), 2)


def counted(pairs: PreferenceBatch) -> np.ndarray:
    """[2B]: 1 at both rows of each pair, 0 at padding: of a sum over pairs."""
    return np.repeat(pairs.weights > 0, 2).astype(np.float32)


def mean_weights(weights: np.ndarray) -> np.ndarray:
    """Of a mean over the update's rows."""
    return (weights / max(weights.sum(), 1e-20)).astype(np.float32)


def plain(tokens: TokenBatch) -> compact.Plain:
    """The rows to read as they are."""
    return compact.Plain(tokens.inputs, tokens.segment_ids, tokens.positions)


def data(
    config: Any,
    tokenizer: Tokenizer,
    model: Model,
    *,
    once: bool = False,
    end: bool = False,
    read: Callable[..., Any] = preferences.pairs,
) -> Any:
    """The stream of judgements to train on, by default of pairs: without end, or each once."""
    batching = preferences.Batching(
        config.batch_size,
        config.seed,
        once=once,
        read_end=end,
        vocab_size=model.config.vocab_size,
    )
    return read(config.data, tokenizer, batching)


def held_out(
    config: Any,
    tokenizer: Tokenizer,
    model: Model,
    *,
    end: bool = False,
    read: Callable[..., Any] = preferences.pairs,
) -> Any:
    """Those of `data.eval`, each once."""
    batching = preferences.Batching(
        config.batch_size,
        part="eval",
        limit=config.eval.rows,
        read_end=end,
        vocab_size=model.config.vocab_size,
    )
    return read(config.data, tokenizer, batching)


def token_logps(model: Model, params: Params, batch: Any) -> Array:
    """[B, T]: log-probabilities of the targets of rows that are laid out, 0 outside the mask."""
    hidden, head = compact.hidden(model, params, batch.read), model.head(params)
    settings = score_settings(model)
    return logps.score_hidden(hidden, head, batch.targets, batch.completion_mask, settings).logps


def make_token_logps(model: Model, microbatches: int) -> Callable[[Params, Any], Array]:
    """`(params, rows) -> [B, T]`, of rows as they are, in parts and without gradient."""

    def scores(params: Params, part: experience.Read) -> Array:
        return token_logps(model, params, part)

    return experience.in_parts(scores, model, microbatches)


def sums(model: Model, params: Params, batch: Any) -> Array:
    """[2B]: log-probabilities of completions, summed under `batch.token_weights`."""
    return jnp.sum(batch.token_weights * token_logps(model, params, batch), axis=1)


def token_weights(mask: np.ndarray, length_weight: float) -> np.ndarray:
    """[2B, T]: 1 on a completion, `length_weight` beyond the length of its pair's other."""
    if length_weight == 1.0:
        return mask.astype(np.float32)
    other = mask.reshape(-1, 2, mask.shape[1])[:, ::-1].reshape(mask.shape)
    both = jnp.asarray(mask), jnp.asarray(other)
    return np.asarray(implicit_rewards.desensitized_weights(*both, alpha=length_weight))


def check_names(key: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ValueError(f"{key}: {name} is not known; do you mean {near[0]}?")


def summary(sums: dict[str, Array]) -> dict[str, Array]:
    """What is logged: sums over an update's pairs, divided once."""
    kept = ("loss", "grad_norm", "pairs")
    means = {n: metrics.ratio(x, sums["pairs"]) for n, x in sums.items() if n not in kept}
    return {"loss": sums["loss"], "grad_norm": sums["grad_norm"], **means}


def make_measure(
    objective: train_step.Objective, model: Model
) -> Callable[[Params, Iterable[Any]], dict[str, Any]]:
    """`(params, batches) -> sums` of what the objective returns, `loss` among it."""

    @jax.jit
    def measure(params: Params, batch: Any) -> dict[str, Array]:
        whole = jax.tree.map(lambda x: x[0], train_step.split(batch, 1))
        loss, found = objective(params, whole)
        return {**found, "loss": loss}

    def run(params: Params, found: Iterable[Any]) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for batch in found:
            _, batch = experience.laid_out(batch, 1, model)
            measured = measure(params, batch)
            total = {name: total.get(name, 0.0) + x for name, x in measured.items()}
        return total

    return run


def means(total: Mapping[str, Any]) -> dict[str, float]:
    """`eval/…`: sums over all pairs, divided by `pairs`.

    Raises:
      ValueError: there is none.
    """
    if not total:
        raise ValueError("data.eval holds no pair to measure on")
    found = jax.device_get(dict(total))
    count = found.pop("pairs")
    return {f"eval/{name}": float(x / count) for name, x in found.items()}


def with_head(policy: setup.Policy, head: Params) -> tuple[Params, Any]:
    """(`{"model": …, "head": …}`, which of it is trained)."""
    params = {"model": policy.params, "head": head}
    if policy.trainable is None:
        return params, None
    return params, {"model": policy.trainable, "head": jax.tree.map(lambda _: True, head)}


# A run ------------------------------------------------------------------------------------------


class Course(NamedTuple):
    """A run under way; `source` is the state besides the parameters that a checkpoint holds."""

    run: runs.Run
    policy: setup.Policy
    trainable: Any
    source: setup.Source
    saver: checkpoint.Checkpointer
    out: writer.Writer
    meter: writer.Meter


def begin(
    config: Any,
    run: runs.Run,
    policy: setup.Policy,
    state: train_step.TrainState,
    trainable: Any,
    source: setup.Source,
    stack: contextlib.ExitStack,
) -> tuple[int, train_step.TrainState, Course]:
    """(updates done, state, the course): from the newest checkpoint, or the start."""
    saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
    start, state, counters = setup.resume(run, saver, state, trainable, source)
    out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
    meter = setup.make_meter(policy, counters)
    setup.tell_of_schedule(run.changed, config.optimizer, start)
    return start, state, Course(run, policy, trainable, source, saver, out, meter)


def end_step(
    config: Any,
    course: Course,
    step: int,
    state: train_step.TrainState,
    report: DataReport,
    measured: Mapping[str, Any],
    evaluate: Callable[[Params], dict[str, float]],
) -> bool:
    """After an update: what was measured, speed, evaluation, checkpoint; whether to stop."""
    run, saver, out, meter = course.run, course.saver, course.out, course.meter
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
            resolved = configs.to_dict(config)
            setup.save(saver, step, state, course.trainable, course.source, meter, resolved, scores)
        saver.check()
    return stopping
