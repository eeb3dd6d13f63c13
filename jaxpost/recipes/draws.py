"""Completions as they are drawn: handed to the reward by the group, as soon as each is done."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpost import rewards, rollout, writer
from jaxpost.data.prompts import Prompt
from jaxpost.recipes import experience, judge, setup
from jaxpost.recipes.experience import Experience
from jaxpost.rollout import Rollout, text
from jaxpost.typing import Array, Params


class Group(NamedTuple):
    """The completions of one prompt, done or not.

    Attributes:
      rollout: [G, N].
      versions: [G, N], how many rollouts the policy that drew a token was trained on.
      texts: [G]; none before the group is done.
      scored: waits for the rewards; None before the group is done.
    """

    prompt: Prompt
    rollout: Rollout
    versions: np.ndarray
    texts: Sequence[str] = ()
    scored: Callable[[], list[rewards.Scored]] | None = None


class Awaited(NamedTuple):
    """Completions that are done and being scored, a group a prompt."""

    groups: Sequence[Group]

    def wait(self, version: int = 0) -> Experience:
        """With the rewards, once all have come, for a policy that is at this version."""
        rollouts = [group.rollout for group in self.groups]
        versions = np.concatenate([group.versions for group in self.groups])
        whole = Rollout(*map(np.concatenate, zip(*rollouts, strict=True)))
        return Experience(
            [group.prompt for group in self.groups],
            whole,
            [words for group in self.groups for words in group.texts],
            [one for group in self.groups for one in scores_of(group)],
            np.where(whole.mask, version - versions, 0),
        )


Draw = Callable[..., Iterator[tuple[int, Rollout]]]  # called as `drawn`


def scores_of(group: Group) -> list[rewards.Scored]:
    """Of a group that is done."""
    assert group.scored is not None  # only such groups are made an `Awaited` of
    return group.scored()


def drawn(
    policy: setup.Policy,
    params: Params,
    prompts: Sequence[Prompt],
    key: Array,
    config: experience.RolloutConfig,
    *,
    sample_ids: Sequence[int] | None = None,
    begun: Rollout | None = None,
) -> Iterator[tuple[int, Rollout]]:
    """(p, G completions of prompt p) as groups are done; all of them, unless some have `begun`.

    Then it ends with a rollout's number of groups, and the others come as far as they are.
    """
    return rollout.sample_groups(
        policy.model,
        params,
        [prompt.tokens for prompt in prompts],
        key,
        group_size=config.completions,
        max_new_tokens=config.max_new_tokens,
        sample_ids=sample_ids,
        begun=begun,
        enough=None if begun is None else config.prompts,
        slots=config.slots,
        cache_dtype=config.cache_dtype,
        stop_ids=policy.tokenizer.eos_ids,
        stop_strings=config.stop_strings,
        tokenizer=policy.tokenizer,
        capacity=rollout.Capacity(
            rows=(config.prompts + config.spare) * config.completions,
            prompts=config.prompts + config.spare,
        ),
        **config.distribution(),
    )


def sampled(
    policy: setup.Policy,
    params: Params,
    prompts: Sequence[Prompt],
    key: Array,
    config: experience.RolloutConfig,
    scorer: judge.Scorer,
) -> Awaited:
    """Samples G completions of each prompt; a group is handed to the reward as soon as it is done.

    So the reward's processes work while the device samples the other groups.
    """
    groups: dict[int, Group] = {}
    for number, found in drawn(policy, params, prompts, key, config):
        group = Group(prompts[number], found, np.zeros(found.tokens.shape, np.int32))
        groups[number] = submitted(policy, group, scorer)
    return Awaited([groups[number] for number in range(len(prompts))])


def submitted(policy: setup.Policy, group: Group, scorer: judge.Scorer) -> Group:
    """A group that is done, handed to the reward."""
    items = items_of(policy, group.prompt, group.rollout)
    texts = [item.completion for item in items]
    return group._replace(texts=texts, scored=scorer.submit(items).result)


def items_of(policy: setup.Policy, prompt: Prompt, drawn: Rollout) -> list[rewards.Item]:
    """What the reward is asked of a prompt's completions."""
    items = []
    for row, length in enumerate(drawn.lengths.tolist()):
        ids = drawn.tokens[row, :length].tolist()
        words = policy.tokenizer.decode(text.without_stop_id(ids, policy.tokenizer.eos_ids))
        cut = bool(drawn.stop_reasons[row] == rollout.LENGTH)
        items.append(rewards.Item(prompt.prompt, words, prompt.example, ids, cut))
    return items


def collect(
    policy: setup.Policy,
    params: Params,
    prompts: Sequence[Prompt],
    key: Array,
    config: experience.RolloutConfig,
    scorer: judge.Scorer,
    watch: writer.Stopwatch,
) -> Experience:
    """Samples completions and waits for the rewards that have not come meanwhile."""
    with watch.part("sample"):
        pending = sampled(policy, params, prompts, key, config, scorer)
    with watch.part("reward"):
        return pending.wait()
