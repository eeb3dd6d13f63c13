"""Learning from completions that are desirable or not: unpaired labels straight to the policy.

The reward of a completion is β u, u = log π/π_ref under a frozen reference. Desirable completions
are pushed above a level, the others below it, and `loss` says which level and how:

    kto        a sigmoid about z₀, how far the policy is from the reference on completions of other
               prompts: max(0, mean u) (KTO, arXiv 2402.01306)
    apo_zero   the same about 0 (APO-zero, arXiv 2408.06266, of single completions)
    bco        a logistic loss about δ, the mean of all rewards so far (BCO, arXiv 2404.04656)

Rows are `prompt`, `completion`, `label`; a pair is read as one row of each kind. The reference is
data: its sums over the completions, and for z₀ over the exchanged ones, are computed once, by the
policy as it starts, before the first update, and kept in a file (`reference.Cache`). A batch may
hold one kind only.

Departures: 1. z₀ and δ are of the whole update and of the policy before it, which reads the
completions they need once more, so that neither microbatches nor packing change them; evaluation
has one z₀ over all of `data.eval`; 2. z₀ is of completions of another prompt wherever the batch has
one: TRL takes the row before, which may be of the same; 3. BCO's weights by density ratios are not
here: they need a classifier of the prompts.

    jaxpost train configs/kto_sums.yaml
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import losses, optimizers, ratios, train_step
from jaxpost.batch import TokenBatch, UnpairedBatch
from jaxpost.data import preferences
from jaxpost.losses import unpaired
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import course, evaluation, experience, pairwise, reference, setup
from jaxpost.typing import Array, Params

log = logging.getLogger(__name__)

MOST = 4 / 3  # KTO advises that desirable completions weigh so much more than others, or as much


@dataclasses.dataclass(frozen=True)
class Config(reference.ReferenceConfig, pairwise.RunConfig):
    """Learning from completions that are desirable or not."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: preferences.PreferenceConfig = option(help="labelled completions to train on")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "completions of an update", "completions", least=1)
    loss: Literal["kto", "apo_zero", "bco"] = option("kto", "the loss of a completion")
    beta: float = option(0.1, "how strongly the policy is held to the reference", above=0)
    desirable_weight: float | None = option(
        None, "kto, apo_zero: weight of desirable completions; null: 1", above=0
    )
    undesirable_weight: float | None = option(
        None, "kto, apo_zero: weight of the other completions; null: 1", above=0
    )

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
        for key in ("desirable_weight", "undesirable_weight"):
            value = vars(self)[key]
            if self.loss == "bco" and value is not None:
                raise ValueError(f"{key} is {value}, which loss: bco does not look at")
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError(
                "batch_size is 1, and loss: kto reads each prompt with the completion of another "
                "row; use 2 or more"
            )
        if self.data.eval is None:
            evaluation.refuse_unused(self.eval)

    @property
    def weights(self) -> tuple[float, float]:
        """Of desirable completions and of the others."""
        return self.desirable_weight or 1.0, self.undesirable_weight or 1.0


class Batch(NamedTuple):
    """Completions after their prompts, one a row.

    `read` is what the model reads, as rows or in fewer (`compact`); `targets` and `completion_mask`
    are [B, T]. Of each row [B]: whether it is desirable, the reference's sum, the weight in the
    update. `level` [] is z₀ or δ.
    """

    read: Any
    targets: Any
    completion_mask: Any
    desirable: Any
    ref_logps: Any
    loss_weights: Any
    level: Any


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the completions given."""

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        sums = jnp.sum(pairwise.token_logps(model, params, batch), axis=1)
        scores = Scores(sums, batch.ref_logps)
        each = loss_of(config, scores, batch.desirable, batch.level)
        measured = measures(config, scores, batch.desirable)
        return jnp.sum(batch.loss_weights * each), jax.lax.stop_gradient(measured)

    return objective


class Scores(NamedTuple):
    """Sums of completions' log-probabilities [B], by the policy and by the reference."""

    logps: Any
    ref_logps: Any


def loss_of(config: Config, scores: Scores, desirable: Array, level: Array) -> Array:
    """[B]: the loss of each completion."""
    if config.loss == "bco":
        return losses.bco(*scores, desirable, level, beta=config.beta)
    weights = dict(zip(("desirable_weight", "undesirable_weight"), config.weights, strict=True))
    return losses.kto(*scores, desirable, level, beta=config.beta, **weights)


def rewards_of(config: Config, scores: Scores) -> Array:
    """[B]: β u."""
    return config.beta * ratios.log_ratio(*scores)


def measures(config: Config, scores: Scores, desirable: Array) -> dict[str, Array]:
    """Sums over the completions of each kind."""
    rewards, kinds = rewards_of(config, scores), {"chosen": desirable, "rejected": ~desirable}
    of_each = {"rewards": rewards, "logps": scores.logps}
    return {
        f"{name}/{kind}": jnp.sum(jnp.where(rows, values, 0.0))
        for name, values in of_each.items()
        for kind, rows in kinds.items()
    }


def summary(config: Config, sums: dict[str, Array], desirable: Any, level: Array) -> dict[str, Any]:
    """What is logged of [B] completions: means of each kind that there is, and their margin."""
    counts = {"chosen": int(np.sum(desirable)), "rejected": int(np.sum(~desirable))}
    found: dict[str, Any] = {f"count/{kind}": count for kind, count in counts.items()}
    for name, total in sums.items():
        count = counts.get(name.rpartition("/")[2])
        if count != 0:
            found[name] = total if count is None else total / count
    if all(counts.values()):
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    named = {"kto": {"kl": level}, "bco": {"shift": level}, "apo_zero": {}}
    return {**found, **named[config.loss]}


def make_batch(rows: UnpairedBatch, ref_logps: np.ndarray) -> Batch:
    """Rows to read; `level` is not known yet."""
    return Batch(
        read=pairwise.plain(rows.tokens),
        targets=rows.tokens.targets,
        completion_mask=rows.tokens.completion_mask,
        desirable=rows.labels,
        ref_logps=ref_logps,
        loss_weights=pairwise.mean_weights(rows.weights),
        level=None,
    )


# Policy, reference, level -----------------------------------------------------------------------

Score = Callable[[Params, TokenBatch], Array]


def make_score(microbatches: int, model: Model) -> Score:
    """`(params, rows) -> [B]`: sums of the completions' log-probabilities."""
    token_logps = pairwise.make_token_logps(model, microbatches)
    return lambda params, rows: jnp.sum(token_logps(params, rows), axis=1)


class Both:
    """Policy and reference on the same rows, without gradient."""

    def __init__(self, score: Score, cache: reference.Cache):
        self._score, self._cache = score, cache

    def ref_logps(self, rows: TokenBatch) -> np.ndarray:
        """[B], of rows that were scored before training."""
        return self._cache(reference.digests(rows))

    def __call__(self, params: Params, rows: TokenBatch) -> Scores:
        return Scores(self._score(params, rows), jnp.asarray(self.ref_logps(rows)))


def make_reference(config: Config, policy: setup.Policy, folder: Path) -> reference.Cache:
    """The reference's numbers of all that training and evaluation will read.

    They are computed now, while the policy is still as it starts (or by `config.reference`, which
    is let go of then), unless the file has them.
    """
    make = functools.partial(make_score, config.microbatches)
    cache, score = reference.opened(config, policy, folder, make, "single completions")
    cache.fill(((rows, reference.digests(rows)) for rows in asked(config, policy)), score)
    return cache


def asked(config: Config, policy: setup.Policy) -> Iterator[TokenBatch]:
    """The rows of each update that comes, and of evaluation; tells of the kinds on the way.

    z₀ exchanges completions within an update, so a row comes with another in every pass.
    """
    labels = []
    with contextlib.closing(data_of(config, policy)) as data:
        for rows, _ in itertools.islice(data, config.steps):
            labels.append(rows.labels)
            yield from sides(config, rows)
    tell_of_kinds(config, np.concatenate(labels))
    if config.data.eval is not None:
        with contextlib.closing(held_out(config, policy)) as data:
            for rows, _ in data:
                yield from sides(config, rows)


def sides(config: Config, rows: UnpairedBatch) -> tuple[TokenBatch, ...]:
    """What is scored of a batch."""
    return (rows.tokens, rows.mismatched) if config.loss == "kto" else (rows.tokens,)


def tell_of_kinds(config: Config, labels: np.ndarray) -> None:
    """Logs how many completions of each kind there are; warns where their weights are uneven."""
    good, bad = int(np.sum(labels)), int(np.sum(~labels))
    log.info("%d updates read %d desirable completions and %d others", config.steps, good, bad)
    if not good or not bad:
        missing = "undesirable" if good else "desirable"
        log.warning("no %s completion is trained on: nothing says what to keep away from", missing)
        return
    of_good, of_bad = config.weights
    ratio = of_good * good / (of_bad * bad)
    if config.loss == "kto" and not 1 <= ratio <= MOST:
        least, most = of_bad * bad / good, MOST * of_bad * bad / good
        log.warning(
            "desirable completions weigh %.3g of what the others do (%d · %.3g against %d · %.3g), "
            "where 1 to 4/3 is advised; set desirable_weight between %.3g and %.3g, or "
            "undesirable_weight between %.3g and %.3g",
            *(ratio, good, of_good, bad, of_bad, least, most),
            *(of_good * good / bad / MOST, of_good * good / bad),
        )


class Level:
    """What an update's completions are compared with: z₀, δ or 0; a source of state for δ."""

    def __init__(self, config: Config, both: Both):
        self._config, self._both = config, both
        self._shift, self._count = jnp.zeros(()), jnp.zeros(())

    def next(self, params: Params, rows: UnpairedBatch) -> Array:
        """[]: of the update that comes, by the policy before it."""
        if self._config.loss == "kto":
            return unpaired.mismatched_kl(*self._both(params, rows.mismatched))
        if self._config.loss == "bco":
            rewards = rewards_of(self._config, self._both(params, rows.tokens))
            self._shift, self._count = unpaired.running_shift(self._shift, self._count, rewards)
        return self._shift

    def held_out(self, mismatched: Scores | None) -> Array:
        """[]: for evaluation, of all its completions; δ is that of training so far."""
        return self._shift if mismatched is None else unpaired.mismatched_kl(*mismatched)

    def get_state(self) -> dict[str, float]:
        return {"shift": float(self._shift), "count": float(self._count)}

    def set_state(self, state: dict[str, float]) -> None:
        self._shift, self._count = jnp.float32(state["shift"]), jnp.float32(state["count"])


# The loop ---------------------------------------------------------------------------------------


def data_of(config: Config, policy: setup.Policy) -> Any:
    """The stream of completions to train on."""
    return pairwise.data(config, policy.tokenizer, policy.model, read=preferences.unpaired)


def held_out(config: Config, policy: setup.Policy) -> Any:
    """The completions of `data.eval`, each once."""
    return pairwise.held_out(config, policy.tokenizer, policy.model, read=preferences.unpaired)


def make_evaluation(
    config: Config, policy: setup.Policy, both: Both, level: Level
) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` over the held-out completions, each of which counts once."""
    if config.data.eval is None:
        return lambda params: {}

    def run(params: Params) -> dict[str, float]:
        found: list[tuple[Scores, ...]] = []
        labels = []
        with contextlib.closing(held_out(config, policy)) as data:
            for rows, _ in data:
                real = rows.weights > 0
                scored = [both(params, side) for side in sides(config, rows)]
                found.append(tuple(Scores(*(x[real] for x in each)) for each in scored))
                labels.append(rows.labels[real])
        if not labels:
            raise ValueError("data.eval holds no completion to measure on")
        own, *exchanged = [
            Scores(*(jnp.concatenate(x) for x in zip(*each, strict=True)))
            for each in zip(*found, strict=True)
        ]
        desirable = np.concatenate(labels)
        here = level.held_out(exchanged[0] if exchanged else None)
        loss = jnp.mean(loss_of(config, own, jnp.asarray(desirable), here))
        sums = {"loss": loss, **measures(config, own, jnp.asarray(desirable))}
        shown = summary(config, sums, desirable, here)
        return {f"eval/{name}": float(value) for name, value in shown.items()}

    return run


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, config.steps)
        cache = make_reference(config, policy, run.folder)
        both = Both(make_score(config.microbatches, policy.model), cache)
        state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
        data = stack.enter_context(contextlib.closing(data_of(config, policy)))
        level = Level(config, both)
        source = experience.Together({"data": data, "level": level})
        start, state, here = pairwise.begin(
            config, run, policy, state, policy.trainable, source, stack
        )
        print(*data.summary, sep="\n")
        objective = make_objective(config, policy.model)
        update = setup.make_update(config, objective, optimizer, policy.trainable)
        evaluate = make_evaluation(config, policy, both, level)
        if start == 0:
            with here.meter.pause():
                here.out.write(0, evaluate(state.params))
        for step in range(start + 1, config.steps + 1):
            rows, report = next(data)
            batch = make_batch(rows, both.ref_logps(rows.tokens))
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            batch = batch._replace(level=level.next(state.params, rows))
            rate = schedule(state.step)
            state, sums = update(state, batch)
            measured = summary(config, sums, rows.labels, batch.level)
            measured = {**measured, "learning_rate": rate, **report.metrics()}
            if pairwise.end_step(config, here, step, state, report, measured, evaluate):
                return run.exit_code
        here.saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
