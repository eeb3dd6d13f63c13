"""Where completions come from: a model draws them, or a file has them.

Completion s of row p of DATA is drawn with `fold_in(key, 1024 p + s)`, so it depends on nothing
else that is drawn, and further completions or rows leave it as it is.
"""

import argparse
import collections
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpost import config as configs
from jaxpost import rewards, selection
from jaxpost.commands import compile_cache, inputs, models
from jaxpost.commands.candidates import settings as reading
from jaxpost.commands.candidates.judging import Asked, Part
from jaxpost.commands.candidates.settings import Settings
from jaxpost.data import completions, prompts
from jaxpost.data.rows import Dropped, PromptRow
from jaxpost.data.stream import Tally
from jaxpost.recipes import draws, experience, reference, setup
from jaxpost.typing import Array

ROWS = 2**31 // selection.MOST  # more have no number of their own in 32 bits
BATCH_SIZE = 64  # completions drawn at once
PROMPTS = 16  # judged at once, of a file


class Source(NamedTuple):
    """Where completions come from.

    Attributes:
      settings: what is asked of it.
      asked: the rows that it has completions for.
      parts: some of these → their completions, part by part.
      identity: what they depend on besides `settings`.
      correct: the reward from which on one is right, by the run.
    """

    settings: Settings
    asked: Sequence[Asked]
    parts: Callable[[Sequence[Asked]], Iterator[Part]]
    identity: Callable[[], dict[str, str]]
    correct: float


def source_of(options: argparse.Namespace) -> Source:
    """The model or the file that MODEL names.

    Raises:
      ConfigError: a setting that is not understood, or has nothing to act on; no prompts.
    """
    inputs.check_data(options.data, "DATA")
    if Path(options.model).is_file():
        return from_file(options)
    compile_cache.use_compile_cache()
    opened = models.open_model(
        options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    return from_model(opened, options)


def from_model(opened: models.Opened, options: argparse.Namespace) -> Source:
    """Completions that are drawn; a run's own settings are where it starts from."""
    settings = reading.read_settings(reading.start_of(opened, options), options)
    policy = setup.Policy(opened.model, opened.params, opened.tokenizer, None)
    fitting = experience.that_fit(settings.data, settings.rollout, policy.model)
    asked = read_prompts(settings, options, prompts.Read(fitting, policy.tokenizer))
    key, size = jax.random.key(settings.seed), options.batch_size or BATCH_SIZE
    correct = opened.config.eval.correct if models.has_prompts(opened.config) else 1.0
    return Source(
        settings,
        asked,
        lambda some: drawn(policy, some, key, settings.rollout, size),
        lambda: {"model": fingerprint_of(policy)},
        correct,
    )


def fingerprint_of(policy: setup.Policy) -> str:
    """Of the parameters, what they compute in, and the tokenizer."""
    kind = policy.model.config.compute_dtype
    return reference.fingerprint(policy.params, kind, policy.tokenizer.fingerprint)


def from_file(options: argparse.Namespace) -> Source:
    """Completions that a file has, of the same prompts as DATA."""
    refuse_drawing(options)
    start = Settings(
        prompts.PromptConfig(train=options.data, eval=options.data),
        None,
        None,
        experience.RolloutConfig(),
        0,
    )
    settings = reading.read_settings(start, options)
    if settings.rollout != start.rollout:
        raise configs.ConfigError(
            f"rollout is for drawing, and {options.model} is a file; leave it out"
        )
    try:
        given = completions.read(options.model)
    except ValueError as error:
        raise configs.ConfigError(f"MODEL, {error}") from error
    rows = read_prompts(settings, options, unread)
    found = matched(options, rows, given)
    return Source(
        settings,
        [asked for asked, _ in found],
        lambda some: in_parts(found, some),
        lambda: {"completions": hashlib.sha256(Path(options.model).read_bytes()).hexdigest()[:16]},
        1.0,
    )


def refuse_drawing(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that a file of completions leaves nothing to do."""
    for name in (*reading.KEYS, "batch_size", "adapter", "dtype"):
        if vars(options)[name] is not None:
            raise configs.ConfigError(
                f"--{name.replace('_', '-')} is for drawing, and {options.model} is a file of "
                "completions; leave it out"
            )
    if options.step != "latest":
        raise configs.ConfigError(
            f"--step is of a run, and {options.model} is a file; leave it out"
        )


def matched(
    options: argparse.Namespace, rows: Sequence[Asked], given: Sequence[completions.Given]
) -> list[tuple[Asked, completions.Given]]:
    """Each row of DATA with the completions of its prompt; of equal prompts in their order.

    What finds no partner is counted on standard error.

    Raises:
      ConfigError: nothing does.
    """
    known: dict[str, collections.deque[completions.Given]] = {}
    for one in given:
        known.setdefault(completions.key_of(one.prompt), collections.deque()).append(one)
    found, alone = [], 0
    for asked in rows:
        several = known.get(completions.key_of(asked.row.prompt))
        if several:
            found.append((asked, several.popleft()))
        else:
            alone += 1
    if not found:
        raise configs.ConfigError(
            f"{given[0].where}: its prompt is none of {options.data}, nor is any other of "
            f"{options.model}; DATA is the file that was sampled for, or {options.model} itself if "
            "its rows hold what the reward reads"
        )
    if alone:
        print(f"{alone} prompts of {options.data} have no completions", file=sys.stderr)
    if len(given) > len(found):
        unasked = len(given) - len(found)
        print(f"{unasked} rows of {options.model} are of no prompt that is asked", file=sys.stderr)
    for _, one in found:
        if len(one.texts) > selection.MOST:
            raise configs.ConfigError(f"{one.where}: more than {selection.MOST} completions")
    return found


def in_parts(
    found: Sequence[tuple[Asked, completions.Given]], some: Sequence[Asked]
) -> Iterator[Part]:
    """Given completions, those of a few prompts at a time."""
    wanted = {asked.prompt.row for asked in some}
    left = [(asked, given) for asked, given in found if asked.prompt.row in wanted]
    for first in range(0, len(left), PROMPTS):
        yield [(asked, as_items(asked, given)) for asked, given in left[first : first + PROMPTS]]


def as_items(asked: Asked, given: completions.Given) -> list[rewards.Item]:
    """What the reward is asked of given completions."""
    prompt, columns = asked.prompt.prompt, asked.prompt.example
    example = {
        name: columns[name] for name in columns if name != "completions"
    }  # no copy with each
    return [
        rewards.Item(prompt, text, example, (), cut)
        for text, cut in zip(given.texts, given.cut, strict=True)
    ]


def drawn(
    policy: setup.Policy,
    some: Sequence[Asked],
    key: Array,
    sampling: experience.RolloutConfig,
    size: int,
) -> Iterator[Part]:
    """Completions of all prompts, about `size` at a time; prompts of like length together."""
    several = max(size // sampling.completions, 1)
    slots = sampling.slots or (size if sampling.completions > size else None)
    sampling = dataclasses.replace(sampling, prompts=several, slots=slots)
    order = sorted(some, key=lambda asked: len(asked.prompt.tokens))
    for first in range(0, len(order), several):
        yield drawn_together(policy, order[first : first + several], key, sampling)


def drawn_together(
    policy: setup.Policy, part: Sequence[Asked], key: Array, sampling: experience.RolloutConfig
) -> Part:
    """What the reward is asked of each prompt's completions, as these are done."""
    numbers = range(sampling.completions)
    ids = [selection.MOST * asked.prompt.row + number for asked in part for number in numbers]
    asked = [one.prompt for one in part]
    for place, found in draws.drawn(policy, policy.params, asked, key, sampling, sample_ids=ids):
        yield part[place], draws.items_of(policy, asked[place], found)


def read_prompts(
    settings: Settings,
    options: argparse.Namespace,
    read: Callable[[PromptRow | Dropped, int], prompts.Prompt | Dropped],
) -> list[Asked]:
    """The first --rows prompts of DATA; those that cannot be asked are counted on standard error.

    Raises:
      ConfigError: there is none, or a row that cannot be read.
    """
    asked, dropped = [], Tally()
    try:
        for number, row in enumerate(prompts.eval_rows(settings.data)):
            if len(asked) == options.rows:
                break
            found = read(row, number)
            if isinstance(row, Dropped) or isinstance(found, Dropped):
                dropped.add([one for one in (row, found) if isinstance(one, Dropped)][:1])
            else:
                asked.append(Asked(row, found))
    except ValueError as error:
        raise configs.ConfigError(f"DATA, {options.data}: {error}") from error
    told = f"; not asked: {dropped}" if dropped.counts else ""
    if not asked:
        raise configs.ConfigError(f"DATA, {options.data}: no prompt that can be asked{told}")
    if asked[-1].prompt.row >= ROWS:
        raise configs.ConfigError(f"DATA, {options.data}: more than {ROWS} rows; divide the file")
    print(f"{options.data}: {len(asked)} prompts{told}", file=sys.stderr)
    return asked


def unread(row: PromptRow | Dropped, number: int) -> prompts.Prompt | Dropped:
    """A row of DATA where nothing is drawn."""
    if isinstance(row, Dropped):
        return row
    return prompts.Prompt(np.zeros(0, np.int32), row.prompt, row.meta, number, row.where)
