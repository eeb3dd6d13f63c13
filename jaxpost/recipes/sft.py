"""Supervised fine-tuning: maximum likelihood of what the data's assistant wrote.

The loss of an update is Σ w_t · nll_t / Σ w_t over all its trained tokens, in all microbatches;
prompts and padding have w = 0, EOS has not. With `z_loss` the term
z · (log Σ_v exp logit_v)² is added (PaLM, arXiv 2204.02311 §5); `loss: dft` weights each token by
its own probability (dynamic fine-tuning, arXiv 2508.05629); `neftune_alpha` adds uniform noise of
size alpha / sqrt(L · D) to the embeddings of a sequence of L tokens (NEFTune, arXiv 2310.05914).

Departures: 1. the mean is over the whole update, never of microbatch means; 2. NEFTune's L is the
length of the sequence itself, not of the padded row.

    jaxpost train configs/sft_smollm2_chain_sum.yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import batch as batches
from jaxpost import (
    checkpoint,
    logps,
    loss_weights,
    losses,
    metrics,
    optimizers,
    runs,
    train_step,
    writer,
)
from jaxpost import config as configs
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import chat, sources, tokenizers
from jaxpost.data.chat import ChatOptions
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import evaluation, setup
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """Supervised fine-tuning of a causal language model."""

    run: str = option(help="folder of the run: checkpoints, metrics, the trained model")
    model: setup.ModelConfig = option(help="the model to train")
    data: sources.DataConfig = option(help="what to train on")
    chat: ChatOptions = option(ChatOptions(), "from rows to tokens and masks")
    optimizer: optimizers.OptimizerConfig = option(optimizers.OptimizerConfig(), "the optimizer")
    steps: int = option(1000, "how long to train", "updates", least=1)
    batch_size: int = option(8, "rows of `data.max_length` tokens in an update", "rows", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    loss: Literal["nll", "dft"] = option("nll", "nll, or dft: weighted by the token's probability")
    z_loss: float = option(0.0, "coefficient of the squared log-normalizer; 0: none", least=0)
    neftune_alpha: float = option(
        0.0, "size of the noise on embeddings (5 is usual); 0: none", least=0
    )
    ema_decay: float | None = option(
        None, "keep a moving average of the parameters, and export it", least=0, below=1
    )
    seed: int = option(0, "of everything random", least=0)
    eval: evaluation.EvalConfig = option(evaluation.EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    def __post_init__(self):
        check_ranges(self)
        optimizers.check_warmup(self.optimizer, self.steps)
        train_step.check_microbatches(self.batch_size, self.microbatches)
        if self.data.eval is None:
            evaluation.refuse_unused(self.eval)
            if self.checkpoint.keep_best or self.checkpoint.metric != CheckpointConfig.metric:
                raise ValueError(
                    "checkpoint.keep_best and checkpoint.metric need data.eval: what is best is "
                    "known by a metric of the held-out data"
                )


class SFTBatch(NamedTuple):
    """A `TokenBatch` whose loss weights sum to 1 over the update, and a noise key a row."""

    inputs: Array
    targets: Array
    completion_mask: Array
    loss_weights: Array
    segment_ids: Array
    positions: Array
    noise_keys: Array


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the rows given."""
    token_loss = {"nll": losses.nll, "dft": losses.dft}[config.loss]

    def per_token(scores: logps.TokenScores, weights: Array) -> Array:
        loss = token_loss(scores.logps)
        if config.z_loss:
            loss += config.z_loss * losses.z_loss(scores.log_normalizers)
        return weights * loss

    def objective(params: Params, batch: SFTBatch):
        noise = neftune(config, model, batch) if config.neftune_alpha else None
        loss, scores = logps.token_loss(
            model, params, batch, per_token, batch.loss_weights, noise=noise
        )
        return loss, {
            "correct": jnp.sum(scores.correct),
            "targets": jnp.sum(batch.completion_mask, dtype=jnp.float32),
        }

    return objective


def neftune(config: Config, model: Model, batch: SFTBatch) -> Array:
    """Uniform noise in ±alpha / sqrt(L · D) on every embedding of a sequence of L tokens."""
    shape = (batch.inputs.shape[1], model.config.width)
    draw = jax.vmap(lambda key: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0))
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    lengths = jnp.sum(same, axis=2, dtype=jnp.float32)
    scale = config.neftune_alpha / jnp.sqrt(lengths * model.config.width)
    return draw(batch.noise_keys) * scale[..., None]


def make_batch(batch: batches.TokenBatch, key: Array) -> SFTBatch:
    """Fixes the weights over the whole update, before it is split; `key` is the step's."""
    rows = batch.inputs.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    weights = loss_weights.token_mean(batch.loss_weights)
    return SFTBatch(**{**batch._asdict(), "loss_weights": weights}, noise_keys=keys)


def make_update(
    config: Config, policy: setup.Policy
) -> Callable[
    [train_step.TrainState, batches.TokenBatch, Array], tuple[train_step.TrainState, dict]
]:
    """The jitted update, at a learning rate; the state's buffers are donated."""
    objective = make_objective(config, policy.model)
    key = jax.random.key(config.seed)

    def update(state: train_step.TrainState, batch: batches.TokenBatch, rate: Array):
        step = train_step.make_train_step(
            objective,
            optimizers.following(config.optimizer, lambda count: rate),
            microbatches=config.microbatches,
            trainable=policy.trainable,
            ema_decay=config.ema_decay,
        )
        state, sums = step(state, make_batch(batch, jax.random.fold_in(key, state.step)))
        return state, {**summary(sums), "learning_rate": rate}

    return jax.jit(update, donate_argnums=0)


def make_tokenize(config: Config, tokenizer: tokenizers.Tokenizer) -> chat.Tokenize:
    """From rows to tokens that the model has."""
    size = setup.architecture_of(config.model, tokenizer.vocab_size).vocab_size
    return chat.Tokenize(tokenizer, config.chat, size)


def make_data(config: Config, tokenizer: tokenizers.Tokenizer) -> sources.DataStream:
    """Batches without end, at a position that can be saved."""
    return sources.batches(
        config.data,
        make_tokenize(config, tokenizer),
        length=config.data.max_length,
        batch_size=config.batch_size,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        fingerprint=tokenizer.fingerprint,
    )


def make_evaluation(
    config: Config, policy: setup.Policy, out: writer.Writer
) -> Callable[[int, Params], dict[str, float]]:
    """`(step, params) -> metrics` on the held-out data; generated answers go to samples.jsonl."""
    if config.data.eval is None:
        return lambda step, params: {}
    measure = evaluation.make_measure(policy.model)

    def run(step: int, params: Params) -> dict[str, float]:
        scores = evaluation.evaluate(measure, params, eval_batches(config, policy.tokenizer))
        if config.eval.generate:
            matches, records = evaluation.exact_match(
                policy.model,
                params,
                policy.tokenizer,
                sources.eval_rows(
                    config.data,
                    make_tokenize(config, policy.tokenizer),
                    config.eval.generate,
                ),
                config.chat,
                max_new_tokens=config.eval.max_new_tokens,
            )
            out.samples(step, records)
            scores |= matches
        return scores

    return run


def eval_batches(config: Config, tokenizer: tokenizers.Tokenizer) -> Iterator[batches.TokenBatch]:
    return sources.eval_batches(
        config.data,
        make_tokenize(config, tokenizer),
        length=config.data.max_length,
        batch_size=config.eval.batch_size,
        rows=config.eval.rows,
    )


def summary(sums: dict[str, Array]) -> dict[str, Array]:
    """What is logged of an update: ratios are formed once, of sums over all of it."""
    correct, targets = sums["correct"], sums["targets"]
    return {
        "loss": sums["loss"],
        "grad_norm": sums["grad_norm"],
        "mean_token_accuracy": metrics.ratio(correct, targets),
    }


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
        state = train_step.init_state(
            policy.params, optimizer, trainable=policy.trainable, ema=config.ema_decay is not None
        )
        data = stack.enter_context(contextlib.closing(make_data(config, policy.tokenizer)))
        saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
        start, state, counters = setup.resume(run, saver, state, policy.trainable, data)
        print(*data.summary, sep="\n")
        out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
        update, rate = make_update(config, policy), jax.jit(schedule)
        evaluate = make_evaluation(config, policy, out)
        meter = setup.make_meter(policy, counters)

        setup.tell_of_schedule(run.changed, config.optimizer, start)
        if start == 0:
            with meter.pause():
                out.write(0, evaluate(0, state.params))
        for step in range(start + 1, config.steps + 1):
            batch, report = next(data)
            if step == start + 1:
                setup.tell_of_passes(report.epoch / step, config.steps)
            state, measured = update(state, batch, rate(state.step))
            setup.check(out.write(step, {**measured, **report.metrics()}))
            evaluating = config.eval.due(step, config.steps)  # stopping or not: it comes only once
            stopping, scores = run.should_stop(step), {}
            saving = saver.due(step) or stopping or step == config.steps
            speed = meter.update(report.tokens, report.examples, measured)
            out.write(step, speed)
            with meter.pause(measured if evaluating or saving else None):
                if evaluating:
                    scores = evaluate(step, setup.averaged(state, policy.trainable))
                    out.write(step, scores)
                if saving:
                    setup.check(out.flush())
                    setup.save(saver, step, state, policy.trainable, data, meter, resolved, scores)
                saver.check()
            if stopping:
                return run.exit_code
        saver.wait()
        params = setup.averaged(state, policy.trainable)
        setup.export(run.folder, policy, params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
