"""Prompts for reinforcement learning: rows to prompt tokens, and what a reward reads of them.

stream = PromptStream(config, tokenizer, seed=0)
prompts = stream.take(16)                 # 16 of Prompt, in a new order each pass
stream.set_state(stream.get_state())      # exact, also in another process
"""

import bisect
import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpost.data import chat, fine_tuning, sources
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import Dropped, Message, PromptRow
from jaxpost.data.stream import Tally, refuse_other
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.options import check_ranges, option

log = logging.getLogger(__name__)

Paths = str | tuple[str, ...] | dict[str, float]


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """Files of prompts. Every other column of a row reaches the reward."""

    train: Paths = option(
        help="files, folders or patterns to train on: one, a list, or a mixture {path: weight}"
    )
    eval: Paths | None = option(None, "held-out files, as `train`; null: none")
    format: str = option("auto", "type of the rows: auto, prompt, question or messages")
    columns: dict[str, str] | None = option(
        None, "the prompt's column under another name, {prompt: text}; a.b is key b of column a"
    )
    as_chat: bool | None = option(
        None, "make plain prompts a user's turn; null: for questions and problems only"
    )
    max_prompt_tokens: int = option(1024, "longer prompts are dropped", "tokens", least=1)
    malformed: Literal["error", "drop"] = option("error", "rows that cannot be read: error or drop")
    shuffle: bool = option(True, "a new random order each pass over the data")
    seed: int | None = option(None, "of the order; null: the run's", least=0)
    template_kwargs: dict[str, Any] | None = option(
        None, "further arguments of the chat template, such as {enable_thinking: false}"
    )

    def __post_init__(self):
        check_ranges(self, "data.")
        for name in ("train", "eval"):
            sources.check_paths(name, getattr(self, name))

    def files(self) -> sources.DataConfig:
        """The same as far as reading rows goes."""
        return sources.DataConfig(
            train=self.train,
            eval=self.eval,
            format=self.format,
            columns=self.columns,
            as_chat=self.as_chat,
            malformed=self.malformed,
            shuffle=self.shuffle,
            seed=self.seed,
        )


class Prompt(NamedTuple):
    """What the policy is to complete.

    Attributes:
      tokens: [n] int32, as the sampler reads them.
      prompt: text or messages, as the data had it.
      example: the row's other columns.
      row: its number among all rows of the data.
      where: its file and line.
    """

    tokens: np.ndarray
    prompt: str | Sequence[Message]
    example: Mapping[str, Any]
    row: int
    where: str


def prompt_row(cells: Cells) -> PromptRow | Dropped:
    """`prompt`: text, or the messages up to the policy's turn."""
    prompt = fine_tuning.prompt_of(cells)
    if not prompt:
        return Dropped("empty_prompt", cells.where)
    plain = isinstance(prompt, str) and not (
        cells.format.kind.turns if cells.format.chat is None else cells.format.chat
    )
    if not plain:
        prompt = fine_tuning.asked(prompt)
    system = cells.text("system")
    if system and not isinstance(prompt, str) and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": system}, *prompt]
    return PromptRow(prompt, **fine_tuning.extras(cells), **cells.common())


def messages_row(cells: Cells) -> PromptRow | Dropped:
    """`messages`: what comes before the last turn, if that is an assistant's; else all."""
    messages, _ = fine_tuning.read_messages(cells, "messages", cells.json("messages") or [])
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        return Dropped("empty_prompt", cells.where)
    return PromptRow(messages, **fine_tuning.extras(cells), **cells.common())


PARTS = (*fine_tuning.CHAT_PARTS, "system")
KINDS = (
    Kind("prompt", {"prompt": ("prompt", "input", "query")}, prompt_row, PARTS),
    Kind(
        "question",
        {"prompt": ("question", "problem", "instruction")},
        prompt_row,
        PARTS,
        turns=True,
    ),
    Kind("messages", {"messages": ("messages", "conversations")}, messages_row, PARTS),
)


class PromptStream:
    """Prompts without end, at a position that can be saved. Each process takes its own share.

    A prompt that is too long, or for which the row has no words, is passed over and counted.

    Attributes:
      summary: a line a file: its rows and their type.
      rows: how many rows the data holds.
      dropped: what was passed over since this stream was made.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        files = config.files()
        self._sources, weights = sources.open_sources(config.train, files, KINDS)
        self._starts = tuple(itertools.accumulate(map(len, self._sources), initial=0))
        self._read = Read(config, tokenizer)
        self._share = (process_index, process_count)
        own = seed if config.seed is None else config.seed
        numbers = [range(*ends) for ends in itertools.pairwise(self._starts)]
        self._order = sources.mixed(numbers, weights, own if config.shuffle else None, None)
        self._next = 0
        self.rows = self._starts[-1]
        self.summary = tuple(sources.summary(self._sources, weights))
        self.dropped = Tally()
        self._fingerprint = {
            "seed": own,
            "shuffle": config.shuffle,
            "processes": process_count,
            **sources.fingerprint_of(files, self._sources, weights),
        }

    def take(self, count: int) -> list[Prompt]:
        """The next prompts of this process.

        Raises:
          ValueError: a whole pass over the data left none.
        """
        taken, fruitless, (index, processes) = [], 0, self._share
        while len(taken) < count:
            if fruitless >= self.rows:
                raise ValueError(
                    f"every one of the {self.rows} rows was dropped: {self.dropped}\n"
                    + "\n".join(self.summary)
                )
            number: Any = self._order[self._next * processes + index]
            self._next += 1
            found = self.prompt(int(number))
            fruitless = fruitless + 1 if found is None else 0
            taken += [] if found is None else [found]
        return taken

    def prompt(self, number: int) -> Prompt | None:
        """The prompt of a row by its number, or None where it is dropped."""
        source = bisect.bisect_right(self._starts, number) - 1
        found = self._read(self._sources[source][number - self._starts[source]], number)
        if isinstance(found, Dropped):
            first = self.dropped.add([found])
            if first.counts:
                log.info("data.train: first rows dropped: %s", first)
            return None
        return found

    def draw(self, count: int, tiers: np.ndarray, step: int) -> list[Prompt]:
        """Prompts of different rows, drawn with probabilities ∝ the first of `tiers` [n, rows].

        Where its rows of positive weight run out, the next one's fill up. The draw depends on the
        seed and `step` alone. Rows that are dropped are drawn over.

        Raises:
          ValueError: fewer than `count` rows of all tiers can be asked.
        """
        tiers, taken = np.array(tiers, np.float64), []
        random = np.random.default_rng([self._fingerprint["seed"], step, *self._share])
        while len(taken) < count:
            weights = next((tier for tier in tiers if tier.any()), None)
            if weights is None:
                raise ValueError(
                    f"{count} different prompts are wanted, and only {len(taken)} can be asked; "
                    f"dropped: {self.dropped}; make rollout.prompts smaller"
                )
            number = int(random.choice(self.rows, p=weights / weights.sum()))
            tiers[:, number] = 0.0
            found = self.prompt(number)
            taken += [] if found is None else [found]
        self._next += count
        return taken

    def column(self, name: str) -> np.ndarray:
        """A column of numbers, or numerals, [rows]; NaN for rows that are dropped.

        Raises:
          ValueError: another row has no number there.
        """
        numbers = np.full(self.rows, np.nan)
        for source, start in zip(self._sources, self._starts, strict=False):
            for index in range(len(source)):
                row = source[index]
                if isinstance(row, Dropped) or isinstance(self._read(row, start + index), Dropped):
                    continue
                number = number_of(row.meta.get(name))
                if number is None:
                    raise ValueError(
                        f"{row.where}: column {name} holds {row.meta.get(name)!r}, not a number"
                    )
                numbers[start + index] = number
        return numbers

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._next * self._share[1] / self.rows

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON can hold it."""
        return {"next": self._next, "fingerprint": self._fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
          ValueError: it was saved over other data, or under other settings; the message says which.
        """
        refuse_other(state["fingerprint"], self._fingerprint, "prompts")
        self._next = state["next"]

    def close(self) -> None:
        """Logs what was dropped."""
        if self.dropped.counts:
            log.info("data.train: rows dropped so far: %s", self.dropped)


def number_of(value: Any) -> float | None:
    """A number, or text that reads as one (a CSV file has nothing else); None if it is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclasses.dataclass(frozen=True)
class Read:
    """A canonical row to a `Prompt`, or why it is dropped."""

    config: PromptConfig
    tokenizer: Tokenizer

    def __call__(self, row: PromptRow | Dropped, number: int) -> Prompt | Dropped:
        if isinstance(row, Dropped):
            return row
        options = chat.ChatOptions(template_kwargs=self.config.template_kwargs)
        tokens = np.asarray(chat.prompt_ids(row, self.tokenizer, options), np.int32)
        if len(tokens) > self.config.max_prompt_tokens:
            return Dropped("too_long", row.where)
        if not len(tokens):
            return Dropped("empty_prompt", row.where)
        return Prompt(tokens, row.prompt, row.meta, number, row.where)


def held_out(config: PromptConfig, tokenizer: Tokenizer, count: int | None) -> list[Prompt]:
    """The first `count` prompts of `config.eval`; all without `count`. Drops are logged."""
    read, dropped, kept = Read(config, tokenizer), Tally(), []
    for number, row in enumerate(eval_rows(config)):
        if len(kept) == count:
            break
        found = read(row, number)
        if isinstance(found, Dropped):
            dropped.add([found])
        else:
            kept.append(found)
    if dropped.counts:
        log.info("data.eval: prompts not asked: %s", dropped)
    if not kept:
        raise ValueError(f"data.eval holds no prompt that can be asked; dropped: {dropped}")
    return kept


def eval_rows(config: PromptConfig) -> Iterator[PromptRow | Dropped]:
    files = config.files()
    given = sources.held_out(files)
    for source in sources.open_sources(given, files, KINDS)[0]:
        for index in range(len(source)):
            yield source[index]
