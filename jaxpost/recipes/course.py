"""How an RL run begins and ends, in every recipe alike; the loop between is the recipe's own.

`config` is a recipe's.
"""

import contextlib
import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxpost import checkpoint, rewards, runs, train_step, writer
from jaxpost import config as configs
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data.prompts import PromptStream
from jaxpost.options import option
from jaxpost.recipes import accuracy, experience, judge, setup
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params

log = logging.getLogger(__name__)

Evaluate = Callable[[int, Params], dict[str, float]]
Judging = rewards.RewardConfig | rewards.JudgeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys of a run, in every recipe that samples alike."""

    run: str = option(help="folder of the run: checkpoints, metrics, samples, the trained model")
    steps: int = option(200, "how long to train", "rollouts", least=1)
    epochs: int = option(1, "passes over each rollout", least=1)
    minibatches: int = option(1, "updates of a pass, over as many parts of the rollout", least=1)
    microbatches: int = option(1, "parts an update is computed in, to save memory", least=1)
    samples: int = option(4, "completions of a rollout written to samples.jsonl", least=0)
    seed: int = option(0, "of everything random", least=0)
    eval: accuracy.EvalConfig = option(accuracy.EvalConfig(), "measuring on `data.eval`")
    checkpoint: CheckpointConfig = option(accuracy.BEST, "saving")
    log: writer.WriterConfig = option(writer.WriterConfig(), "metrics out")
    resume_anyway: bool = option(False, "resume although the configuration was changed")

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.epochs * self.minibatches


class Opened(NamedTuple):
    """What there is before anything is restored or trained."""

    run: runs.Run
    resolved: Mapping[str, Any]
    key: Array
    policy: setup.Policy
    data: PromptStream
    judging: Judging
    scorer: judge.Scorer
    saver: checkpoint.Checkpointer


class Course(NamedTuple):
    """A run under way; `source` is the state besides the parameters that a checkpoint holds."""

    opened: Opened
    trainable: Any
    source: setup.Source
    out: writer.Writer
    evaluate: Evaluate
    meter: writer.Meter
    watch: writer.Stopwatch


class RewardFiles:
    """Notices where a file of rewards is another than at the checkpoint; state without effect."""

    def __init__(self, config: Judging):
        self._digests = {}
        for part in config.all_parts():
            place = pathlib.Path(part.function.rpartition(":")[0]).expanduser()
            if place.suffix == ".py" and place.is_file():
                self._digests[str(place)] = hashlib.sha256(place.read_bytes()).hexdigest()

    def get_state(self) -> dict[str, str]:
        return self._digests

    def set_state(self, state: dict[str, str]) -> None:
        for place, digest in self._digests.items():
            if state.get(place, digest) != digest:
                log.warning("%s was changed since the checkpoint: rewards may be others", place)


def open_run(config: Any, stack: contextlib.ExitStack) -> runs.Run:
    """The run's folder; see `runs.open_run`. A finished run needs nothing else."""
    setup.check_devices()
    return stack.enter_context(
        runs.open_run(
            config.run,
            configs.to_dict(config),
            steps=config.steps,
            resume_anyway=config.resume_anyway,
        )
    )


def open_parts(
    config: Any, run: runs.Run, stack: contextlib.ExitStack, judging: Judging | None = None
) -> Opened:
    """Policy, prompts, what judges (else `config.reward`), checkpoints; closed with the stack."""
    key = jax.random.key(config.seed)
    policy = setup.load_policy(config.model, key)
    fitting = experience.that_fit(config.data, config.rollout, policy.model)
    data = PromptStream(fitting, policy.tokenizer, seed=config.seed)
    stack.callback(data.close)
    own: Judging = judging or config.reward
    scorer = stack.enter_context(judge.opened(own))
    saver = stack.enter_context(checkpoint.Checkpointer(run.checkpoints, config.checkpoint))
    return Opened(run, configs.to_dict(config), key, policy, data, own, scorer, saver)


def begin(
    config: Any,
    opened: Opened,
    state: train_step.TrainState,
    trainable: Any,
    source: setup.Source,
    stack: contextlib.ExitStack,
    make_evaluation: Callable[..., Evaluate] = accuracy.make_evaluation,
) -> tuple[int, train_step.TrainState, Course]:
    """(rollouts done, state, the course): from the newest checkpoint, or the start."""
    run, saver = opened.run, opened.saver
    source = experience.Together({"recipe": source, "reward": RewardFiles(opened.judging)})
    start, state, counters = setup.resume(run, saver, state, trainable, source)
    print(*opened.data.summary, sep="\n")
    out = stack.enter_context(writer.Writer(run.folder, config.log, steps=config.steps))
    evaluate = make_evaluation(config, opened.policy, opened.scorer, out)
    meter, watch = writer.Meter(counters=counters), writer.Stopwatch()
    return start, state, Course(opened, trainable, source, out, evaluate, meter, watch)


def measure(course: Course, step: int, params: Params) -> dict[str, float]:
    """Evaluates, writes and returns the measures; the clock of the speed stands still."""
    with course.meter.pause():
        scores = course.evaluate(step, params)
        course.out.write(step, scores)
    return scores


def end_step(
    config: Any,
    course: Course,
    step: int,
    state: train_step.TrainState,
    params: Params,
    seen: Experience,
) -> bool:
    """After the updates of a rollout: speed, evaluation, checkpoint. Returns whether to stop.

    `params` are the policy's, `seen` is all that was sampled.
    """
    run, out, saver, meter = course.opened.run, course.out, course.opened.saver, course.meter
    out.write(step, meter.update(int(seen.rollout.lengths.sum()), len(seen.texts)))
    stopping, scores = run.should_stop(step), {}
    if config.eval.due(step, config.steps):
        scores = measure(course, step, params)
    with meter.pause():
        out.write(step, course.watch.lap())
        if saver.due(step) or stopping or step == config.steps:
            setup.check(out.flush())
            setup.save(
                saver,
                step,
                state,
                course.trainable,
                course.source,
                meter,
                course.opened.resolved,
                scores,
            )
        saver.check()
    return stopping


def finish(config: Any, course: Course, params: Params) -> int:
    """Writes the trained model; returns the exit code."""
    run = course.opened.run
    course.opened.saver.wait()
    setup.export(run.folder, course.opened.policy, params, config.model.path)
    run.finish(config.steps)
    return run.exit_code
