"""From rows that compare or judge completions to their tokens: `Judged`, or why there are none.

The completions of a row begin with the same prompt, token by token. Where one is too long, the
prompts are cut alike, or all completions are, or the row is dropped: never one side alone.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpost.batch import Example
from jaxpost.data import chat
from jaxpost.data.rows import (
    ComparedRow,
    CompletionRow,
    Dropped,
    Ids,
    LabelledRow,
    Note,
    Noted,
    PromptRow,
    StepsRow,
    TextRow,
    TokensRow,
    Words,
)
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.data.windows import Window

TooLong = Literal["drop", "keep_end", "keep_start", "error"]
Ranking = Literal["all", "best_worst", "list"]


class Judged(NamedTuple):
    """Completions after their prompt, with what is known of them.

    Attributes:
      examples: the best first; each is the prompt and a completion.
      prompt: tokens of the prompt, with which every example begins.
      values: of a pair its margin, of a single completion its label, of steps one label each.
      row: the row's number among all rows of the data.
      where: its file and line.
      weight: 1 over the pairs that were made of the row.
    """

    examples: tuple[Example, ...]
    prompt: int
    values: tuple[float, ...]
    row: int
    where: str
    weight: float = 1.0

    def digest(self) -> str:
        """The same for the same prompt and completions, and what is trained of them; else not."""
        found = hashlib.blake2b(digest_size=16)
        found.update(np.array([self.prompt, len(self.examples)], "<i8").tobytes())
        for tokens, mask, _ in self.examples:
            found.update(np.array([len(tokens)], "<i8").tobytes())
            found.update(np.asarray(tokens, "<i4").tobytes() + np.packbits(mask).tobytes())
        return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Judge:
    """(number of the window, its numbered rows) → a Window of `Judged`.

    Attributes:
      tokenizer, vocab_size, template_kwargs: see `chat.Tokenize`.
      limit: tokens of a sequence, at most.
      too_long: what becomes of a row with a longer one.
      malformed: whether a row that cannot be tokenised is an error or dropped.
      ranking: how completions with scores are compared: in all pairs, the best and the worst, or as
        a list of `most` at most.
      score_margins: whether the difference of scores is a pair's margin.
      mask_shared: whether tokens that all completions begin with are read, and not trained.
      single: whether the two of a pair come apart, each with its label.
      separator: what ends a step.
    """

    tokenizer: Tokenizer
    limit: int
    too_long: TooLong
    malformed: Literal["error", "drop"]
    vocab_size: int | None = None
    template_kwargs: dict[str, Any] | None = None
    ranking: Ranking = "all"
    most: int = 2
    score_margins: bool = True
    mask_shared: bool = False
    single: bool = False
    separator: str = ""

    def __call__(self, number: int, rows: Sequence[tuple[int, Any]]) -> Window:
        items: list[Judged] = []
        dropped: list[Dropped] = []
        notes: list[Note] = []
        for at, row in rows:
            told: list[Note] = []
            found = [self.guarded(part, at, told) for part in self.parts(row)]
            kept = [one for one in found if isinstance(one, Judged)]
            dropped += [one for one in found if isinstance(one, Dropped)]
            notes += dict.fromkeys(told) if kept else ()
            kept = [one._replace(weight=1.0 / len(kept)) for one in kept]
            items += [half for one in kept for half in self.halves(one)]
        return Window(tuple(items), np.ones(len(items), np.int32), tuple(dropped), tuple(notes))

    def parts(self, row: Any) -> list[Any]:
        """A row as rows that each become one `Judged`, and `Dropped` for ties."""
        if not isinstance(row, ComparedRow):
            return [row]
        count = len(row.completions)
        if self.ranking == "all":
            return [pair_of(row, *pair) for pair in itertools.combinations(range(count), 2)]
        if self.ranking == "best_worst":
            return [pair_of(row, 0, count - 1)]
        if count > self.most:
            return [Dropped("too_many", row.where)]
        tied = row.scores is not None and len(set(row.scores)) < count
        return [Dropped("tie", row.where)] if tied else [row]

    def guarded(self, row: Any, number: int, told: list[Note]) -> Judged | Dropped:
        """`judged`, with the row's place in what it refuses."""
        if isinstance(row, Dropped):
            return row
        try:
            return self.judged(row, number, told)
        except ValueError as error:
            message = str(error) if row.where in str(error) else f"{row.where}: {error}"
            if self.malformed == "drop":
                return Dropped("malformed", message)
            raise ValueError(message) from error

    def judged(self, row: Any, number: int, told: list[Note]) -> Judged | Dropped:
        """The tokens of a row."""
        if isinstance(row, StepsRow):
            found = self.steps(row)
            values = tuple(label for label in row.labels if label is not None)
        elif isinstance(row, LabelledRow):
            found = self.alike(row, [row.completion], row.prompt, None, told)
            values = (float(row.label),)
        else:
            found = self.alike(row, row.completions, row.prompt, row.begun, told)
            values = (self.margin(row),)
        if isinstance(found, Dropped):
            return found
        examples, prompt = found
        if isinstance(row, StepsRow):
            values = values[: int(np.sum(examples[0].mask))]
        return Judged(tuple(examples), prompt, values, number, row.where)

    def margin(self, row: ComparedRow) -> float:
        """The margin that was given, or the difference of the scores, or 0."""
        if row.margin is not None:
            return row.margin
        if not self.score_margins or row.scores is None or len(row.scores) != 2:
            return 0.0
        return row.scores[0] - row.scores[1]

    def halves(self, pair: Judged) -> list[Judged]:
        """The two of a pair as single completions, where they are wanted so."""
        if not self.single or len(pair.examples) == 1:
            return [pair]
        labelled = zip(pair.examples, (1.0, 0.0), strict=True)
        return [pair._replace(examples=(one,), values=(label,)) for one, label in labelled]

    # Completions of one prompt ---------------------------------------------------------------

    def alike(
        self,
        row: Any,
        sides: Sequence[Words],
        prompt: Words | None,
        begun: str | None,
        told: list[Note],
    ) -> tuple[list[Example], int] | Dropped:
        """The completions after the prompt, and the length of the prompt that all begin with."""
        found = [self.side(row, prompt, side, begun) for side in sides]
        for one in found:
            if isinstance(one, Dropped):
                return one
            told += one.notes if isinstance(one, Noted) else ()
        examples = [one.example if isinstance(one, Noted) else one for one in found]
        examples = [one for one in examples if isinstance(one, Example)]
        common = shared(examples)
        if prompt is None:
            examples = [read_up_to(example, common) for example in examples]
        firsts = [int(np.argmax(example.mask)) for example in examples]
        start = common if prompt is None else min(firsts)
        if repeated(examples):
            return Dropped("identical", row.where)
        if not all(self.says_something(example, start) for example in examples):
            return Dropped("empty_target", row.where)
        if common < start:
            return Dropped("prompts_differ", row.where)
        if self.mask_shared and len(examples) > 1:
            start, examples = common, [read_up_to(example, common) for example in examples]
        if not all(example.mask[1:].any() for example in examples):
            return Dropped("fully_masked", row.where)
        return self.fitted(examples, start, row.where)

    def side(
        self, row: Any, prompt: Words | None, side: Words, begun: str | None
    ) -> Example | Noted | Dropped:
        """The tokens of a prompt and a completion."""
        where, end = row.where, begun is None
        more = {"tools": row.tools, "template_kwargs": row.template_kwargs, "where": where}
        if isinstance(side, Ids):
            assert isinstance(prompt, Ids)
            mask = [False] * len(prompt.tokens) + [True] * len(side.tokens)
            return self.tokens(TokensRow([*prompt.tokens, *side.tokens], mask, where=where))
        if prompt is None:
            assert isinstance(side, str)
            return self.tokens(TextRow(side, where=where))
        assert not isinstance(prompt, Ids)
        if begun is not None and isinstance(prompt, str):
            prompt = prompt + begun
        elif begun is not None:
            parts = [(begun, 0.0), (side, 1.0)]
            content = [{"type": "text", "text": t, "weight": w} for t, w in parts if t]
            side = [{"role": "assistant", "content": content}]
        found = self.tokens(CompletionRow(prompt, side, **more))
        return found if end else without_end(found, self.tokenizer)

    def tokens(self, row: Any) -> Example | Noted | Dropped:
        """What fine-tuning makes of a row. Reasoning may be left open: that may be what is bad."""
        options = chat.ChatOptions(reasoning_open="", template_kwargs=self.template_kwargs)
        return chat.Tokenize(self.tokenizer, options, self.vocab_size)(row)

    def says_something(self, example: Example, start: int) -> bool:
        """Whether something but its end, and white space, comes after the prompt."""
        ends, ids = self.tokenizer.eos_ids, example.tokens[start:].tolist()
        return bool(self.tokenizer.decode([i for i in ids if i not in ends]).strip())

    def fitted(
        self, examples: list[Example], prompt: int, where: str
    ) -> tuple[list[Example], int] | Dropped:
        """The examples and their prompt, all cut in the same way where one is too long."""
        lengths = [len(example.tokens) for example in examples]
        if (excess := max(lengths) - self.limit) <= 0:
            return examples, prompt
        if self.too_long == "error":
            raise ValueError(
                f"{where}: {max(lengths)} tokens with the prompt, where there is room for "
                f"{self.limit}; raise max_length, or set too_long to drop, keep_end or keep_start"
            )
        if self.too_long == "keep_end":
            first = int(prompt > 0 and examples[0].tokens[0] == self.tokenizer.bos_id)
            if prompt - excess <= first:
                return Dropped("too_long", where)
            kept = [without(example, first, first + excess) for example in examples]
            return kept, prompt - excess
        if self.too_long == "drop":
            return Dropped("too_long", where)
        if min(lengths) < self.limit:
            return Dropped("ends_differ", where)
        examples = [without(example, self.limit, None) for example in examples]
        if not all(example.mask[1:].any() for example in examples):
            return Dropped("too_long", where)
        return Dropped("identical", where) if repeated(examples) else (examples, prompt)

    # Steps -----------------------------------------------------------------------------------

    def steps(self, row: StepsRow) -> tuple[list[Example], int] | Dropped:
        """A prompt and steps, each tokenised on its own; labels are of the last token of each."""
        options = chat.ChatOptions(template_kwargs=self.template_kwargs)
        asked = PromptRow(row.prompt, row.tools, row.template_kwargs, where=row.where)
        ids = chat.prompt_ids(asked, self.tokenizer, options)
        mask, prompt = [False] * len(ids), len(ids)
        for step, label in zip(row.steps, row.labels, strict=True):
            found = self.inside(step) + self.inside(self.separator)
            if not found:
                return Dropped("empty_target", row.where)
            ids, mask = ids + found, mask + [False] * (len(found) - 1) + [label is not None]
        example = Example(np.array(ids, np.int32), np.array(mask), np.array(mask, np.float32))
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            return Dropped("outside_vocabulary", row.where)
        return self.fitted_steps(example, prompt, row.where)

    def fitted_steps(
        self, example: Example, prompt: int, where: str
    ) -> tuple[list[Example], int] | Dropped:
        """`fitted`; where the end is cut, the steps that end in reach are left."""
        if self.too_long != "keep_start" or len(example.tokens) <= self.limit:
            return self.fitted([example], prompt, where)
        last = np.flatnonzero(example.mask[: self.limit])
        if not len(last):
            return Dropped("too_long", where)
        return [without(example, int(last[-1]) + 1, None)], prompt

    def inside(self, text: str) -> list[int]:
        return self.tokenizer.encode_inside(text)[0] if text else []


def pair_of(row: ComparedRow, better: int, worse: int) -> ComparedRow | Dropped:
    """Two completions of a ranking, or a tie."""
    if row.scores is None:
        return dataclasses.replace(row, completions=[row.completions[i] for i in (better, worse)])
    scores = [row.scores[better], row.scores[worse]]
    if scores[0] == scores[1]:
        return Dropped("tie", row.where)
    sides = [row.completions[better], row.completions[worse]]
    return dataclasses.replace(row, completions=sides, scores=scores)


def shared(examples: Sequence[Example]) -> int:
    """How many tokens all begin with."""
    length = min(len(example.tokens) for example in examples)
    rows = np.stack([example.tokens[:length] for example in examples])
    differs = (rows != rows[0]).any(axis=0)
    return int(np.argmax(differs)) if differs.any() else length


def repeated(examples: Sequence[Example]) -> bool:
    """Whether two have the same tokens."""
    return len({example.tokens.tobytes() for example in examples}) < len(examples)


def read_up_to(example: Example, count: int) -> Example:
    """The first tokens are read, and not trained."""
    mask = example.mask & (np.arange(len(example.mask)) >= count)
    return Example(example.tokens, mask, np.where(mask, example.weights, 0).astype(np.float32))


def without(example: Example, start: int, stop: int | None) -> Example:
    """An example without some of its tokens."""
    stop = len(example.tokens) if stop is None else stop
    return Example(*(np.concatenate([field[:start], field[stop:]]) for field in example))


def without_end(
    found: Example | Noted | Dropped, tokenizer: Tokenizer
) -> Example | Noted | Dropped:
    """A completion that goes on: without its end-of-turn token, and what comes after."""
    if isinstance(found, Dropped):
        return found
    if isinstance(found, Noted):
        example = without_end(found.example, tokenizer)
        return found._replace(example=example) if isinstance(example, Example) else found
    last = int(np.flatnonzero(found.mask)[-1])
    ends = int(found.tokens[last]) in tokenizer.eos_ids
    return without(found, last if ends else last + 1, None)
