"""Preferences at three levels at once: whole sessions, what follows a step, groups of actions.

An agent's session is long, and that it failed says little of each of its actions. Hierarchical
preference learning (HPL, arXiv 2510.03253) compares sessions, suffixes of the expert's from every
step on, and groups of a few actions, beside imitating the expert:

    L = L_BC + L_trajectory + L_suffix + L_group        L_BC = −log π of the expert's actions

(`nll_weight` is the weight of the first, each level has its own). A level's loss is the mean over
its pairs of the update, of `loss` (DPO, and whatever recipe dpo has). Groups enter by a curriculum:
short and easy ones first, then those of middle length or difficulty, then all (`curriculum`,
column `phase`). The pairs come from `jaxpost pairs trajectory`, `suffix` and `group`; a level may
be any other file of pairs, or left out. The paper has beta 0.3 and equal weights.

Departures: 1. L_BC is of the chosen sides of trajectory pairs: make these with `--whole` if all of
the expert's actions are to be imitated, also those with which the other session begins; 2. where
the curriculum's phases begin is not in the paper: after a third of the run and two thirds; 3. in a
phase that has no group yet the level has no loss.

    jaxpost train configs/hpl_totals.yaml
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import batch as batches
from jaxpost import losses, metrics, optimizers, train_step
from jaxpost.batch import PreferenceBatch, TokenBatch
from jaxpost.data import hierarchy, preferences
from jaxpost.data.preference_stream import PHASES
from jaxpost.data.preferences import PreferenceReport
from jaxpost.data.stream import DataReport
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import (
    course,
    evaluation,
    experience,
    moving_reference,
    pair_losses,
    pair_reference,
    pairwise,
    setup,
)
from jaxpost.typing import Array, Params

log = logging.getLogger(__name__)

KINDS = hierarchy.KINDS
Found = Mapping[str, tuple[PreferenceBatch, PreferenceReport]]


@dataclasses.dataclass(frozen=True)
class Config(pair_losses.LossConfig, moving_reference.ReferenceConfig, pairwise.RunConfig):
    """Preferences at three levels at once."""

    model: setup.ModelConfig = option(help="the policy to train")
    data: hierarchy.HierarchyConfig = option(help="pairs of up to three kinds")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-6, schedule="linear"), "the optimizer"
    )
    nll_weight: float = option(
        1.0, "weight of -log pi, summed over a chosen trajectory's tokens; 0: none", least=0
    )
    curriculum: tuple[float, float] | None = option(
        (0.33, 0.67),
        "when groups of phase 2 and 3 join: after so many updates, or below 1 this share of all; "
        "null: all groups from the start",
    )

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
        self.check_losses(self.microbatches, self.of_reference())
        self.check_reference(self.model, self.steps)
        for name in set(pair_losses.SORTING) & self.losses().keys():
            raise ValueError(f"loss: {name} ranks all pairs of an update, of which levels differ")
        if self.nll_weight and self.data.trajectory is None:
            raise ValueError(
                f"nll_weight is {self.nll_weight:g}, of data.trajectory, which is not set; set "
                "nll_weight=0"
            )
        if not self.data.eval:
            evaluation.refuse_unused(self.eval)
        self.check_curriculum()

    def check_curriculum(self) -> None:
        """Raises ValueError for a curriculum that is none, or has nothing to order."""
        if self.curriculum is None:
            return
        if self.data.group is None and self.curriculum != Config.curriculum:
            raise ValueError("curriculum is of data.group, which is not set; leave it out")
        known = all(x >= 0 and (x < 1 or x == int(x)) for x in self.curriculum)
        if not known or list(self.starts) != sorted(self.starts):
            raise ValueError(
                f"curriculum is {list(self.curriculum)}: write two whole numbers of updates, or "
                "shares below 1, in this order"
            )

    @property
    def batch_size(self) -> int:
        """Pairs of an update."""
        return sum(level.pairs for level in self.data.levels.values())

    @property
    def ordered(self) -> bool:
        """Whether groups join by phase."""
        return self.data.group is not None and self.curriculum is not None

    @property
    def starts(self) -> tuple[int, ...]:
        """The updates after which each phase begins."""
        later = (int(x * self.steps if x < 1 else x) for x in self.curriculum or (0, 0))
        return (0, *later)

    def phase(self, step: int) -> int:
        """Of an update, from 1."""
        return sum(step > start for start in self.starts)


class Batch(NamedTuple):
    """The sides of pairs as rows [2B, T]: chosen, rejected, chosen, …, of one level after another.

    `read` is what the model reads, as rows or in fewer (`compact`). `token_weights` are 0 outside
    the mask. The last three are one number a row [2B]: the reference's sum under those weights, the
    weight in the mean over the level's pairs, and the level's place in `KINDS`.
    """

    read: Any
    targets: Any
    completion_mask: Any
    token_weights: Any
    ref_logps: Any
    loss_weights: Any
    kinds: Any


def make_objective(config: Config, model: Model) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the pairs given."""

    def objective(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        logps = pairwise.token_logps(model, params, batch)
        sides = pair_losses.sides(batch, jnp.sum(batch.token_weights * logps, axis=1))
        chosen = pairwise.two(jnp.sum(logps, axis=1))[0]
        weights, kinds = (pairwise.two(x)[0] for x in (batch.loss_weights, batch.kinds))
        loss, found = total(config, sides, chosen, weights, kinds)
        return loss, jax.lax.stop_gradient(found)

    return objective


def total(
    config: Config, sides: pair_losses.Sides, chosen: Array, weights: Array, kinds: Array
) -> tuple[Array, dict[str, Array]]:
    """The weighted levels, and sums of each over its pairs; all of arrays [B].

    `chosen` is log π of the chosen side, all its tokens alike. `weights` are those of a mean over
    the pairs of one of `kinds`.
    """
    each, loss, found = pair_losses.pair_loss(config, sides), jnp.zeros(()), {}
    for kind, level in config.data.levels.items():
        of_kind = jnp.where(kinds == KINDS.index(kind), weights, 0.0)
        terms = {"loss": (level.weight, jnp.sum(of_kind * each))}
        if kind == "trajectory" and config.nll_weight:
            terms["nll"] = (config.nll_weight, jnp.sum(of_kind * losses.nll(chosen)))
        loss += sum(weight * mean for weight, mean in terms.values())
        own = pair_losses.measures(config, sides, of_kind)
        own |= {name: mean for name, (_, mean) in terms.items()}
        found |= {f"{kind}/{name}": value for name, value in own.items()}
    return loss, found


MEANS = ("loss", "nll")  # of a level's metrics those that are means already


def summary(found: Found, sums: Mapping[str, Array]) -> dict[str, Array]:
    """What is logged: of each level in the update means over its pairs."""
    out = {name: sums[name] for name in ("loss", "grad_norm")}
    for name, value in sums.items():
        kind, _, rest = name.partition("/")
        if kind in found and rest != "pairs":
            out[name] = value if rest in MEANS else metrics.ratio(value, sums[f"{kind}/pairs"])
    return out


# The batch --------------------------------------------------------------------------------------


def make_batch(
    config: Config,
    found: Found,
    ref_logps: pair_reference.Known,
    weigh: Callable[[PreferenceBatch], np.ndarray] = pairwise.weights_of,
) -> Batch:
    """Rows of the levels that there are, evenly mixed, with the weights of their tokens and pairs.

    `weigh`: pairs → [2B], by default of the mean over them.
    """
    several = [batches.flat(pairs.tokens) for pairs, _ in found.values()]
    rows, counts = stacked(several), [len(part.inputs) for part in several]
    batch = Batch(
        read=pairwise.plain(rows),
        targets=rows.targets,
        completion_mask=rows.completion_mask,
        token_weights=pairwise.token_weights(rows.completion_mask, config.length_weight),
        ref_logps=np.concatenate([ref_logps(*level) for level in found.values()]),
        loss_weights=np.concatenate([weigh(pairs) for pairs, _ in found.values()]),
        kinds=np.repeat([KINDS.index(kind) for kind in found], counts).astype(np.int32),
    )
    order = evenly(counts)
    return jax.tree.map(lambda x: x[order], batch)


def stacked(parts: Sequence[TokenBatch]) -> TokenBatch:
    """Parts of different lengths as one, padded at their ends."""
    longest = max(part.inputs.shape[1] for part in parts)

    def joined(fields: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in fields])

    return TokenBatch(*(joined(fields) for fields in zip(*parts, strict=True)))


def evenly(counts: Sequence[int]) -> np.ndarray:
    """An order of rows that puts the pairs of each level everywhere, so in every microbatch."""
    places = np.concatenate([np.arange(count) // 2 / count for count in counts])
    return np.argsort(places, kind="stable")


def filled(batch: Batch, rows: int) -> Batch:
    """With padding in the place of a level that waits, so that all updates have as many rows."""

    def more(field: np.ndarray) -> np.ndarray:
        return np.pad(field, [(0, rows - len(field)), *[(0, 0)] * (field.ndim - 1)])

    return jax.tree.map(more, batch)


# The data ---------------------------------------------------------------------------------------


def streams(config: Config) -> dict[str, tuple[str, int | None]]:
    """Name → (kind, last phase that is read): one a level, of groups with a curriculum one a phase.

    There is none for a phase up to which there are no groups.
    """
    found: dict[str, tuple[str, int | None]] = {kind: (kind, None) for kind in config.data.levels}
    if config.ordered:
        del found["group"]
        first = hierarchy.first_phase(config.data.pairs("group"))
        found |= {f"group_{phase}": ("group", phase) for phase in PHASES if phase >= first}
    return found


def tell_of_curriculum(config: Config, phases: Sequence[int]) -> None:
    """Logs when groups of the phases that there are join; warns where none does from the start."""
    after = ", ".join(map(str, config.starts[1:]))
    log.info("groups of phases 2 and 3 join after the updates %s of %d", after, config.steps)
    if phases[0] > PHASES[0]:
        log.warning(
            "no group is of a phase before %d: the level waits until then; curriculum=null trains "
            "all groups from the start",
            phases[0],
        )


def pairs_of(config: Config, policy: setup.Policy, kind: str, **batching: Any) -> Any:
    """A stream of pairs of one kind."""
    how = preferences.Batching(
        config.data.levels[kind].pairs,
        config.seed,
        vocab_size=policy.model.config.vocab_size,
        **batching,
    )
    return preferences.pairs(config.data.pairs(kind), policy.tokenizer, how)


class Data:
    """The pairs of all levels; a source of state."""

    def __init__(self, config: Config, policy: setup.Policy):
        self._config, self._names = config, streams(config)
        if config.ordered:
            tell_of_curriculum(config, [last for _, last in self._names.values() if last])
        self._streams = {
            name: pairs_of(config, policy, kind, last_phase=last)
            for name, (kind, last) in self._names.items()
        }
        self._source = experience.Together(self._streams)
        self.get_state, self.set_state = self._source.get_state, self._source.set_state

    def next(self, step: int) -> Found:
        """The pairs of an update; a level that waits for its phase is absent."""
        phase = self._config.phase(step)
        return {
            kind: next(self._streams[name])
            for name, (kind, last) in self._names.items()
            if last in (None, phase)
        }

    @property
    def summary(self) -> list[str]:
        """A line a file."""
        return list(dict.fromkeys(line for s in self._streams.values() for line in s.summary))

    def close(self) -> None:
        """Stops the workers."""
        for stream in self._streams.values():
            stream.close()


def asked(config: Config, policy: setup.Policy) -> Iterator[Any]:
    """The (pairs, report) that training and evaluation will ask the reference for."""
    phases = [config.phase(step) for step in range(1, config.steps + 1)]
    for kind, last in streams(config).values():
        updates = config.steps if last is None else phases.count(last)
        if updates:
            open_data = functools.partial(pairs_of, config, policy, kind, last_phase=last)
            yield from pair_reference.to_come(open_data, updates)
    for kind in config.data.levels:
        yield from held_out(config, policy, kind)


def held_out(config: Config, policy: setup.Policy, kind: str) -> Iterator[Any]:
    """The (pairs, report) of `data.KIND.eval`, if there is one."""
    if config.data.levels[kind].eval is None:
        return
    more = {"part": "eval", "limit": config.eval.rows}
    with contextlib.closing(pairs_of(config, policy, kind, **more)) as data:
        yield from data


def told(config: Config, found: Found, step: int) -> tuple[DataReport, dict[str, float]]:
    """What is in an update, and what is logged of it by level."""
    reports = {kind: report for kind, (_, report) in found.items()}
    counts = {
        name: sum(getattr(report, name) for report in reports.values())
        for name in ("examples", "tokens", "trained", "capacity")
    }
    epoch = max(report.epoch for report in reports.values())
    shown = {
        f"{kind}/{name}": value
        for kind, report in reports.items()
        for name, value in report.metrics().items()
    }
    if config.ordered:
        shown["phase"] = float(config.phase(step))
    return DataReport(**counts, epoch=epoch, dropped={}, places={}), shown


# The loop ---------------------------------------------------------------------------------------


def make_evaluation(
    config: Config, policy: setup.Policy
) -> Callable[[pair_reference.Known, Params], dict[str, float]]:
    """`(the reference's numbers, params) -> metrics` over each level's held-out pairs."""
    measure = pairwise.make_measure(make_objective(config, policy.model), policy.model)

    def run(ref_logps: pair_reference.Known, params: Params) -> dict[str, float]:
        shown, loss = {}, 0.0
        for kind in (kind for kind, level in config.data.levels.items() if level.eval is not None):
            found = (
                make_batch(config, {kind: level}, ref_logps, pairwise.counted)
                for level in held_out(config, policy, kind)
            )
            sums = jax.device_get(measure(params, found))
            if not sums:
                raise ValueError(f"data.{kind}.eval holds no pair to measure on")
            pairs = sums.pop(f"{kind}/pairs")
            loss += float(sums.pop("loss") / pairs)
            own = {name: x for name, x in sums.items() if name.startswith(f"{kind}/")}
            shown |= {f"eval/{name}": float(x / pairs) for name, x in own.items()}
        return {**shown, "eval/loss": loss} if shown else {}

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
        data = stack.enter_context(contextlib.closing(Data(config, policy)))
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
            found = data.next(step)
            batch = filled(make_batch(config, found, refer(state)), 2 * config.batch_size)
            _, batch = experience.laid_out(batch, config.microbatches, policy.model)
            rate = schedule(state.step)
            state, sums = update(state, batch)
            report, shown = told(config, found, step)
            measured = {**summary(found, sums), "learning_rate": rate, **shown}
            measure = functools.partial(evaluate, refer(state))
            if pairwise.end_step(config, here, step, state, report, measured, measure):
                return run.exit_code
        here.saver.wait()
        setup.export(run.folder, policy, state.params, config.model.path)
        run.finish(config.steps)
        return run.exit_code
