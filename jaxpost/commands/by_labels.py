"""`jaxpost eval` of models that score completions, by labels: as their own training measures them.

They are named as their recipes are: reward_model, process_reward_model, generative_verifier.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpost import checkpoint, hub
from jaxpost import config as configs
from jaxpost.commands import inputs, models, recipes
from jaxpost.data import preferences, questions, tokenizers
from jaxpost.models import heads
from jaxpost.recipes import pairwise, setup
from jaxpost.typing import Params

VERIFIER = questions.KIND
KINDS = (*models.SCORING, VERIFIER)
HEADS: Mapping[str, Callable[[int], Params]] = {
    "reward_model": heads.reward_head,
    "process_reward_model": heads.zero_head,
}
LOADERS: Mapping[str, Callable[..., Any]] = {
    "reward_model": hub.load_reward_model,
    "process_reward_model": hub.load_process_reward_model,
}
READ = ("data.", "batch_size=", "eval.rows=")  # keys that a measurement looks at


class Scoring(NamedTuple):
    """A model that scores, with its head if it has one in `params`, and how its data is read."""

    config: Any
    policy: setup.Policy
    params: Params


def kind_of(path: str) -> str | None:
    """Which of `KINDS` a run or a folder is; None for one that only writes."""
    try:
        if models.is_run(path):
            place = checkpoint.find_checkpoint(Path(path).expanduser(), "latest")
            kind = checkpoint.read_config(place)["recipe"]
        else:
            kind = hub.kind_of(path)
    except (OSError, ValueError, checkpoint.CheckpointError):
        return None  # what opens it says why it cannot be opened
    return kind if kind in KINDS else None


def is_asked(kind: str, options: argparse.Namespace) -> bool:
    """Whether a scoring model is measured by labels: a verifier may also write."""
    writes = options.generate or options.reward is not None
    return kind != VERIFIER or not writes


def measure(
    kind: str, options: argparse.Namespace
) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
    """The measures of the recipe on DATA, and no records."""
    refuse_unused(kind, options)
    opened = of_run(options) if models.is_run(options.model) else of_folder(kind, options)
    config = on_data(opened.config, options)
    inputs.check_length(config.data.max_length, opened.policy.model.config)
    print(f"{options.data}: measured as a {kind.replace('_', ' ')}", file=sys.stderr)
    evaluate = recipes.named(kind).make_evaluation(config, opened.policy)
    return evaluate(opened.params), ()


def refuse_unused(kind: str, options: argparse.Namespace) -> None:
    """Refuses what would do nothing. Raises ConfigError."""
    names = ("reward", "completions", "temperature", "max_tokens", "samples", "adapter", "generate")
    for name in names:
        if vars(options)[name]:
            raise configs.ConfigError(
                f"--{name.replace('_', '-')} is for models that write, and {options.model} is a "
                f"{kind.replace('_', ' ')}, measured by the labels in DATA; leave it out"
            )
    for setting in options.overrides:
        if not setting.startswith(READ):
            raise configs.ConfigError(
                f"{setting}: a {kind.replace('_', ' ')} is measured under data.*, eval.rows and "
                "batch_size"
            )


def on_data(config: Any, options: argparse.Namespace) -> Any:
    """The configuration with DATA held out, under the options and overrides."""
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train=options.data, eval=options.data),
        eval=pairwise.EvalConfig(rows=options.rows),
        batch_size=options.batch_size or config.batch_size,
        microbatches=1,
    )
    return configs.override(config, options.overrides)


def of_run(options: argparse.Namespace) -> Scoring:
    """That of a checkpoint."""
    place = checkpoint.find_checkpoint(
        Path(options.model).expanduser(), models.step_of(options.step)
    )
    print(f"reading {place}", file=sys.stderr)
    written = checkpoint.read_config(place)
    config = configs.from_dict(recipes.named(written["recipe"]).Config, written)
    policy = setup.load_policy(config.model, jax.random.key(config.seed))
    params, trainable = policy.params, policy.trainable
    if written["recipe"] in HEADS:
        head = HEADS[written["recipe"]](policy.model.config.width)
        params, trainable = pairwise.with_head(policy, head)
    params = models.restored(place, written, params, trainable)
    return cast(Scoring(config, policy, params), options.dtype)


def of_folder(kind: str, options: argparse.Namespace) -> Scoring:
    """That of a Hugging Face folder, its data read as by default."""
    path = options.model
    if options.step != "latest":
        raise ValueError(f"{path} is not a run's folder, so it has no step {options.step}")
    if kind in LOADERS:
        model, params, head = LOADERS[kind](path, dtype=options.dtype)
        params = {"model": params, "head": head}
    else:
        model, params = hub.load_model(path, dtype=options.dtype)
    tokenizer = tokenizers.load_tokenizer(path)
    setup.check_vocabulary(tokenizer, model.config.vocab_size, path)
    data = data_of(kind, path, tokenizer, options.data)
    room = min(data.max_length, model.config.max_positions)
    config = recipes.named(kind).Config(
        run="",
        model=setup.ModelConfig(path=path),
        data=dataclasses.replace(data, max_length=room),
    )
    return Scoring(config, setup.Policy(model, params, tokenizer, None), params)


def data_of(kind: str, path: str, tokenizer: tokenizers.Tokenizer, data: str) -> Any:
    """How a folder's data is read: as it says of itself."""
    if kind == "reward_model":
        return preferences.PairConfig(train=data)
    if kind == "process_reward_model":
        return preferences.StepConfig(train=data, step_separator=hub.step_separator(path))
    asked = questions.from_note(hub.note_of(path), tokenizer, path)
    return preferences.QuestionConfig(
        train=data,
        question=asked.text,
        answers=asked.answers,
        as_chat=asked.as_chat,
        template_kwargs=asked.template_kwargs,
    )


def cast(opened: Scoring, dtype: str | None) -> Scoring:
    """The model in another type; a head stays as it is, in float32."""
    policy, params = opened.policy, opened.params
    whole = params["model"] if "head" in params else params
    found = models.cast(models.Opened(policy.model, whole, policy.tokenizer, None), dtype)
    params = {**params, "model": found.params} if "head" in params else found.params
    return opened._replace(policy=policy._replace(model=found.model), params=params)
