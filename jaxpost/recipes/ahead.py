"""A run's rollouts, of which some are begun before the update that they are for.

`rollout.staleness: n` samples a rollout n updates early, by the policy of then: its rewards come
while the device samples and updates (one step off: n = 1). `rollout.spare: n` samples n prompts
more than a rollout has, ends when enough are done, and goes on with the others in the next (partial
rollouts: Kimi k1.5, arXiv 2501.12599, which ends at a number of tokens). Then tokens of a
completion come from several policies. Each keeps the log-probability it was drawn with, which the
recipe's `importance` corrects for (decoupled PPO: arXiv 2505.24298).

How stale a rollout is does not depend on time, so a run is exact; and what is under way is saved
with it. On one device sampling and updates take turns: what is hidden is the time of the rewards.
"""

import base64
import collections
import io
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpost import rewards, rollout, writer
from jaxpost.data.prompts import Prompt
from jaxpost.recipes import course, draws
from jaxpost.recipes.draws import Awaited, Group
from jaxpost.recipes.experience import Experience
from jaxpost.rollout import UNFINISHED, Rollout
from jaxpost.typing import Params

log = logging.getLogger(__name__)

SAMPLING = 1 << 29  # a step that no run reaches, for the key


class Rollouts:
    """`next` gives the rollout of each step, in order; a source of state that can be saved.

    A completion is drawn by its group's number in the run.

    Args:
      config: a recipe's, of which `rollout` and `steps` are read.
      take: `(step, count)` → the prompts to begin with for the rollout of a step.
      draw: what draws their completions, called as `draws.drawn` is.
    """

    def __init__(
        self,
        config: Any,
        opened: course.Opened,
        take: Callable[[int, int], list[Prompt]],
        draw: draws.Draw = draws.drawn,
    ):
        self._policy, self._scorer, self._find = opened.policy, opened.scorer, opened.data.prompt
        self._config, self._steps = config.rollout, config.steps
        self._take, self._draw = take, draw
        self._key = jax.random.fold_in(opened.key, SAMPLING)
        self._sampled = 0  # rollouts so far
        self._numbers = itertools.count()
        self._begun: list[tuple[int, Group]] = []  # not done, or not of a rollout yet
        self._ready: collections.deque[Awaited] = collections.deque()

    def next(self, step: int, params: Params, watch: writer.Stopwatch) -> Experience:
        """The rollout of a step; later ones are sampled first, as far as `staleness` goes."""
        with watch.part("sample"):
            while self._sampled < min(step + self._config.staleness, self._steps):
                self._sampled += 1
                self._ready.append(self._sample(params, step - 1))
        if step == self._steps and self._begun:
            log.info("%d prompts are left under way by the last rollout", len(self._begun))
        with watch.part("reward"):
            return self._ready.popleft().wait(step - 1)

    def _sample(self, params: Params, version: int) -> Awaited:
        """Begins new groups beside those under way, until a rollout's number of them is done."""
        count, size = self._config.prompts, self._config.completions
        fresh = self._take(self._sampled, count + self._config.spare - len(self._begun))
        groups = self._begun + [(next(self._numbers), self._unbegun(prompt)) for prompt in fresh]
        begun = [group.rollout for _, group in groups]
        finished = self._draw(
            self._policy,
            params,
            [group.prompt for _, group in groups],
            self._key,
            self._config,
            sample_ids=[number * size + one for number, _ in groups for one in range(size)],
            begun=Rollout(*map(np.concatenate, zip(*begun, strict=True)))
            if self._config.spare
            else None,
        )
        done: list[int] = []
        for index, found in finished:
            number, group = groups[index]
            old = group.rollout.mask
            versions = np.where(found.mask & ~old, version, group.versions)
            group = group._replace(rollout=copied(found), versions=versions)
            if len(done) < count and not (found.stop_reasons == UNFINISHED).any():
                group = draws.submitted(self._policy, group, self._scorer)
                done.append(index)
            groups[index] = number, group
        self._begun = [groups[index] for index in range(len(groups)) if index not in done]
        return Awaited([groups[index][1] for index in sorted(done)])

    def _unbegun(self, prompt: Prompt) -> Group:
        shape = self._config.completions, self._config.max_new_tokens
        return Group(prompt, rollout.unstarted(*shape), np.zeros(shape, np.int32))

    def get_state(self) -> dict[str, Any]:
        """As JSON can hold it. Waits for the rewards of what is ready."""
        number = next(self._numbers)
        self._numbers = itertools.count(number)
        return {
            "sampled": self._sampled,
            "numbers": number,
            "begun": [[number, saved(group)] for number, group in self._begun],
            "ready": [[saved(group) for group in pending.groups] for pending in self._ready],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """What a changed configuration cannot go on with is dropped, and said to be."""
        self._sampled, self._numbers = state["sampled"], itertools.count(state["numbers"])
        self._begun = [(number, self._restored(one)) for number, one in state["begun"]]
        self._ready = collections.deque(
            Awaited([self._restored(one) for one in groups]) for groups in state["ready"]
        )
        lost = sum(len(pending.groups) for pending in self._ready) + len(self._begun)
        self._drop_what_does_not_fit()
        lost -= sum(len(pending.groups) for pending in self._ready) + len(self._begun)
        if lost:
            log.warning(
                "%d groups of completions were under way under other settings (rollout.prompts, "
                "completions, max_new_tokens, staleness or spare), and are dropped",
                lost,
            )

    def _drop_what_does_not_fit(self) -> None:
        config = self._config
        shape = config.completions, config.max_new_tokens
        done = [group for pending in self._ready for group in pending.groups]
        whole = all(len(pending.groups) == config.prompts for pending in self._ready)
        begun = [group for _, group in self._begun]
        if any(group.versions.shape != shape for group in done + begun) or not whole:
            begun, whole = [], False
        if not whole or not config.off_policy:
            self._sampled -= len(self._ready)
            self._ready.clear()
        if not config.spare or not begun:
            self._begun = []

    def _restored(self, state: Mapping[str, Any]) -> Group:
        prompt = self._find(state["row"])
        assert prompt is not None  # the data is that of the run, which its own state made sure of
        drawn, versions = unpacked(state["drawn"])
        group = Group(prompt, drawn, versions)
        if state["scored"] is None:
            return group
        scored = [rewards.Scored(*(nan_of(one[0]), *one[1:])) for one in state["scored"]]
        texts = [item.completion for item in draws.items_of(self._policy, prompt, drawn)]
        return group._replace(texts=texts, scored=lambda: scored)


def copied(found: Rollout) -> Rollout:
    """Of its own: the sampler's arrays hold all groups."""
    return Rollout(*map(np.array, found))


def saved(group: Group) -> dict[str, Any]:
    """A group as JSON can hold it."""
    scored = None if group.scored is None else group.scored()
    return {
        "row": group.prompt.row,
        "drawn": packed(group.rollout, group.versions),
        "scored": scored and [[none_of(one.value), *one[1:]] for one in scored],
    }


def packed(drawn: Rollout, versions: np.ndarray) -> str:
    """The arrays of a group as text."""
    file = io.BytesIO()
    np.savez_compressed(file, versions=versions, **drawn._asdict())
    return base64.b64encode(file.getvalue()).decode()


def unpacked(text: str) -> tuple[Rollout, np.ndarray]:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
        return Rollout(*(arrays[name] for name in Rollout._fields)), arrays["versions"]


def none_of(value: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(value) else value


def nan_of(value: float | None) -> float:
    return float("nan") if value is None else value
