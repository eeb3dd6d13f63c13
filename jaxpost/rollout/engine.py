"""Continuous batching: sequences wait, take slots as these become free, and leave when done.

The device decodes until enough slots are free, on its own; the host then takes what is done,
refills the slots and lets the device go on before it hands the completions out.
"""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpost.models.model import Cache
from jaxpost.rollout import slots as device
from jaxpost.rollout import text
from jaxpost.rollout.settings import Settings
from jaxpost.rollout.shapes import Shapes, padded
from jaxpost.rollout.slots import Entries, Forward, Slots
from jaxpost.typing import Array, Params

BLOCK = 8  # tokens decoded between two looks at the text
REFILL = 16  # one slot in so many is free before the host is asked to refill

_empty = jax.jit(device.empty, static_argnums=(0, 1, 2, 3))
_prefill = jax.jit(device.prefill, static_argnums=0)
_insert = jax.jit(device.insert, static_argnums=0, donate_argnums=1)
_advance = jax.jit(device.advance, static_argnums=(0, 1), donate_argnums=3)
_cut = jax.jit(device.cut, donate_argnums=0)
_pick = jax.jit(device.pick, static_argnums=0)


class Waiting(NamedTuple):
    """A completion to sample.

    Attributes:
      row: its place among the results.
      prompt: what is read before the first draw, an earlier beginning of the completion included.
      begun: tokens of that beginning.
      limit: the most tokens to draw.
      sample_id: it draws with `fold_in(key, sample_id)`.
    """

    row: int
    prompt: np.ndarray
    begun: int
    limit: int
    sample_id: int


class Ended(NamedTuple):
    """What was drawn of a completion, and why it ended (UNFINISHED: it has not)."""

    row: int
    tokens: np.ndarray
    logps: np.ndarray
    reason: int


class Prefix(NamedTuple):
    """The cache of some prompts, and their rows in it."""

    cache: Cache
    rows: dict[bytes, int]


class Engine:
    """Slots on the device, and who is in them; `run` empties the queue."""

    def __init__(
        self,
        forward: Forward,
        params: Params,
        key: Array,
        sequences: Sequence[Waiting],
        settings: Settings,
        shapes: Shapes,
        tokenizer: text.Tokenizer | None,
    ):
        self.forward, self.params, self.key = forward, params, key
        self.settings, self.shapes, self.rules = settings, shapes, settings.rules()
        self.decode = tokenizer.decode if tokenizer is not None and settings.stop_strings else None
        self.waiting = collections.deque(sequences)
        self.users = collections.Counter(one.prompt.tobytes() for one in sequences)
        self.prefixes: list[Prefix] = []
        self.held: list[Waiting | None] = [None] * shapes.widths[0]
        self.seen = [0] * shapes.widths[0]  # tokens in which no stop string was found
        self.stopped = False
        self.sampled = self.left = 0  # tokens drawn in all, and those of completions that ended
        slots = _empty(forward, shapes.widths[0], shapes.length, shapes.new_tokens, key)
        for width in shapes.widths[1:]:  # compiled now, so that nothing is later
            self.decoded(_pick(forward, slots, np.arange(width, dtype=np.int32)), 0, 0)
        self.slots = self.decoded(slots, 0, 0)

    def run(self, *, promptly: bool = False, budget: int | None = None) -> Iterator[list[Ended]]:
        """Completions as they end; those that `budget` or `stop` leave unfinished come last.

        Args:
          promptly: hand them out soon after they end, though no other waits for the slot.
          budget: tokens to draw in all; the last step may draw one for each slot beyond it.
        """
        ended: list[Ended] = []
        while not self.stopped and (budget is None or self.sampled < budget):
            self.fill()
            self.narrow()
            if not self.running():
                break
            self.advance(promptly=promptly, budget=budget)
            if ended:
                yield ended  # the device goes on meanwhile
            ended = self.collect()
        yield ended + self.unfinished()

    def stop(self) -> None:
        """Ends `run` after what the device is at; tokens drawn by then are kept."""
        self.stopped = True

    def running(self) -> int:
        return sum(one is not None for one in self.held)

    def fill(self) -> None:
        """Gives the free slots to those who wait."""
        free = [slot for slot, one in enumerate(self.held) if one is None]
        entering = [(slot, self.waiting.popleft()) for slot in free[: len(self.waiting)]]
        for slot, one in entering:
            self.held[slot], self.seen[slot] = one, 0
        while entering:
            first = entering[0][1].prompt.tobytes()
            prefix = next((held for held in self.prefixes if first in held.rows), None)
            prefix = prefix or self.read([one for _, one in entering])
            self.insert(prefix, [place for place in entering if in_prefix(place[1], prefix)])
            entering = [place for place in entering if not in_prefix(place[1], prefix)]

    def read(self, entering: Sequence[Waiting]) -> Prefix:
        """Reads the prompts that are needed next, as many as are read at once."""
        prompts: dict[bytes, np.ndarray] = {}
        for one in itertools.chain(entering, self.waiting):
            if len(prompts) == self.shapes.prompts:
                break
            if not any(in_prefix(one, held) for held in self.prefixes):
                prompts[one.prompt.tobytes()] = one.prompt[:-1]
        rows = list(prompts.values())
        tokens, lengths = padded(rows, self.shapes.prompts, self.shapes.prompt_tokens)
        cache = _prefill(self.forward, self.params, tokens, lengths)
        prefix = Prefix(cache, {prompt: row for row, prompt in enumerate(prompts)})
        self.prefixes.append(prefix)
        return prefix

    def insert(self, prefix: Prefix, entering: Sequence[tuple[int, Waiting]]) -> None:
        entries = Entries(*np.zeros((7, len(self.held)), np.int32))
        for place, (slot, one) in enumerate(entering):
            prompt = one.prompt.tobytes()
            entries.slots[place], entries.sources[place] = slot, prefix.rows[prompt]
            entries.newest[place], entries.positions[place] = one.prompt[-1], len(one.prompt) - 1
            entries.limits[place], entries.sample_ids[place] = one.limit, one.sample_id
            self.users[prompt] -= 1
        entries = entries._replace(number=np.int32(len(entering)))
        self.slots = _insert(self.forward, self.slots, prefix.cache, entries, self.key)
        self.prefixes = [
            held for held in self.prefixes if any(self.users[prompt] for prompt in held.rows)
        ]

    def narrow(self) -> None:
        """Leaves idle slots out when few sequences are left."""
        width = self.shapes.widths[-1]
        if self.waiting or self.running() > width or len(self.held) <= width:
            return
        busy = [slot for slot, one in enumerate(self.held) if one is not None]
        idle = [slot for slot, one in enumerate(self.held) if one is None]
        rows = (busy + idle)[:width]
        self.slots = _pick(self.forward, self.slots, np.array(rows, np.int32))
        self.held, self.seen = [self.held[row] for row in rows], [self.seen[row] for row in rows]

    def advance(
        self, *, promptly: bool = False, budget: int | None = None, block: int | None = None
    ) -> None:
        """Lets the device decode until a slot's turn has come, or `block` tokens."""
        width, running = len(self.held), self.running()
        few = width - running + min(max(width // REFILL, 1), running)
        narrower = width - self.shapes.widths[-1]
        if self.waiting or promptly:
            until = few
        else:
            until = narrower if width - running < narrower else width
        steps = block or (BLOCK if self.decode else self.settings.max_new_tokens)
        if budget is not None:
            steps = min(steps, -(-(budget - self.sampled) // running))
        self.slots = self.decoded(self.slots, steps, until)

    def decoded(self, slots: Slots, steps: int, until: int) -> Slots:
        numbers = np.int32(steps), np.int32(until)
        return _advance(self.forward, self.settings.top_k, self.params, slots, self.rules, *numbers)

    def collect(self) -> list[Ended]:
        """Takes what is done out of its slots."""
        if self.decode is not None:
            self.cut_at_strings(self.decode)
        done, lengths, reasons = jax.device_get(
            (self.slots.done, self.slots.lengths, self.slots.stop_reasons)
        )
        over = {slot: one for slot, one in enumerate(self.held) if one is not None and done[slot]}
        ended = self.drawn(over, lengths, reasons)
        self.left += sum(len(one.tokens) for one in ended)
        for slot in over:
            self.held[slot] = None
        still = [lengths[slot] for slot, one in enumerate(self.held) if one is not None]
        self.sampled = self.left + int(sum(still))
        return ended

    def drawn(self, held: Mapping[int, Waiting], lengths, reasons) -> list[Ended]:
        """What was drawn for those in these slots."""
        if not held:
            return []
        tokens, logps = jax.device_get((self.slots.tokens, self.slots.logps))
        return [
            Ended(
                one.row,
                np.array(tokens[slot, : lengths[slot]]),
                np.array(logps[slot, : lengths[slot]]),
                int(reasons[slot]),
            )
            for slot, one in held.items()
        ]

    def so_far(self) -> list[Ended]:
        """What was drawn for those who still hold a slot."""
        held = {slot: one for slot, one in enumerate(self.held) if one is not None}
        reasons = [device.UNFINISHED] * len(self.held)
        return self.drawn(held, jax.device_get(self.slots.lengths), reasons)

    def unfinished(self) -> list[Ended]:
        """What the budget leaves: those in slots, and those who have waited in vain."""
        nothing = np.zeros(0, np.int32), np.zeros(0, np.float32), device.UNFINISHED
        return self.so_far() + [Ended(one.row, *nothing) for one in self.waiting]

    def cut_at_strings(self, decode: text.Decode) -> None:
        """Ends the completions whose text holds a stop string."""
        tokens, lengths = (np.array(x) for x in (self.slots.tokens, self.slots.lengths))
        ended = np.zeros(len(lengths), bool)
        for slot, one in enumerate(self.held):
            if one is None or lengths[slot] == self.seen[slot]:
                continue
            begun = one.prompt[len(one.prompt) - one.begun :].tolist()
            ids = text.without_stop_id(
                begun + tokens[slot, : lengths[slot]].tolist(), self.settings.stop_ids
            )
            known = one.begun + self.seen[slot]
            count = text.completed_at(ids, known, self.settings.stop_strings, decode)
            if count is not None:
                ended[slot], lengths[slot] = True, count - one.begun
            self.seen[slot] = int(lengths[slot])
        if ended.any():
            self.slots = _cut(self.slots, ended, lengths)


def in_prefix(one: Waiting, prefix: Prefix) -> bool:
    return one.prompt.tobytes() in prefix.rows
