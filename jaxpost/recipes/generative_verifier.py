"""A generative verifier: a language model that answers whether a solution is right.

It reads a question about prompt and solution (`data.question`); its score is P(right answer) over
the sum of both answers' probabilities, of the first token of each: σ(z), z = l_yes − l_no
(SWE-Gym, arXiv 2412.21139, §4.1; a verdict without reasoning of arXiv 2408.15240). `loss` is

    nll    −y l_yes − (1 − y) l_no, over the whole vocabulary: the answer is learnt as text (theirs)
    bce    −y log σ(z) − (1 − y) log(1 − σ(z)): only which of the two answers

Rows are `prompt`, `completion`, `label`, or pairs, of which the chosen completion is right. The
folder is that of a language model, whose `config.json` says what is asked and which tokens answer.

Departures: 1. only the first token of an answer is trained; 2. the middle of a long solution is not
cut out: a question that has no room is dropped.

    jaxpost train CONFIG.yaml
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpost import compact, logps, losses, optimizers, train_step
from jaxpost.data import preferences
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.hub import notes
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import course, evaluation, pairwise, setup, verdicts
from jaxpost.typing import Array, Params

Answers = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Config(pairwise.RunConfig):
    """A verifier from solutions that are right or wrong."""

    run: str = option(help="folder of the run: checkpoints, metrics, the verifier")
    model: setup.ModelConfig = option(help="the model that it starts from")
    data: preferences.QuestionConfig = option(help="solutions to train on, and what is asked")
    optimizer: optimizers.OptimizerConfig = option(
        optimizers.OptimizerConfig(learning_rate=1e-5, schedule="linear"), "the optimizer"
    )
    batch_size: int = option(32, "solutions of an update", "solutions", least=1)
    loss: Literal["nll", "bce"] = option(
        "nll", "of the answer among all tokens, or of the two answers alone"
    )

    def __post_init__(self):
        self.check_run(self.batch_size, self.optimizer)
        if self.data.eval is None:
            evaluation.refuse_unused(self.eval)


def make_judge(config: Config, model: Model, answers: Answers) -> verdicts.Judge:
    """`(params, batch) -> verdicts` after the questions."""
    settings = pairwise.score_settings(model)

    def judge(params: Params, batch: verdicts.Batch) -> verdicts.Verdicts:
        hidden, mask = compact.hidden(model, params, batch.read), batch.completion_mask
        last = jnp.argmax(mask, axis=1)  # a question has one place
        both = jnp.repeat(jnp.take_along_axis(hidden, last[:, None, None], axis=1), 2, axis=1)
        targets = jnp.broadcast_to(jnp.array(answers), both.shape[:2])
        asked = jnp.repeat(jnp.any(mask, axis=1)[:, None], 2, axis=1)
        found = logps.score_hidden(both, model.head(params), targets, asked, settings).logps
        right, wrong = (jnp.where(mask, one[:, None], 0.0) for one in found.T)
        return verdicts.Verdicts(right - wrong, loss_of(config.loss, right, wrong, batch))

    return judge


def loss_of(loss: str, right: Array, wrong: Array, batch: Any) -> Array:
    """[B, T]: of the answers' log-probabilities, which are 0 outside the places."""
    if loss == "bce":
        each = losses.value_bce(right - wrong, batch.labels)
        return jnp.where(batch.completion_mask, each, 0.0)
    return batch.labels * losses.nll(right) + (1.0 - batch.labels) * losses.nll(wrong)


def make_objective(config: Config, model: Model, answers: Answers) -> train_step.Objective:
    """`(params, batch) -> (loss, metrics)`, sums over the questions given."""
    return verdicts.make_objective(make_judge(config, model, answers))


def make_evaluation(config: Config, policy: setup.Policy) -> Callable[[Params], dict[str, float]]:
    """`params -> metrics` of the solutions of `data.eval`."""
    judge = make_judge(config, policy.model, answers_of(config, policy.tokenizer))
    measures = (verdicts.place_measures,)
    return verdicts.make_evaluation(config, policy, judge, preferences.questions, measures)


def answers_of(config: Config, tokenizer: Tokenizer) -> Answers:
    """The tokens that answer. Raises ValueError for answers that begin alike."""
    return config.data.asked().answer_ids(tokenizer)


def train(config: Config) -> int:
    """Runs, or resumes, the recipe; returns the exit code (0 finished, 75 stopped on request)."""
    with contextlib.ExitStack() as stack:
        run = course.open_run(config, stack)
        if run.finished:
            return run.exit_code
        policy = setup.load_policy(config.model, jax.random.key(config.seed))
        answers = answers_of(config, policy.tokenizer)
        learner = verdicts.Learner(
            policy,
            policy.params,
            policy.trainable,
            make_objective(config, policy.model, answers),
            preferences.questions,
            make_evaluation(config, policy),
        )
        params = verdicts.learn(config, run, learner, stack)
        if params is not None:
            note = config.data.asked().note(policy.tokenizer)
            noted = policy._replace(model=notes.with_note(policy.model, **note))
            setup.export(run.folder, noted, params, config.model.path)
            run.finish(config.steps)
        return run.exit_code
