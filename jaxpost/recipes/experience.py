"""What the RL recipes share: prompts to completions, to rewards, to rows that are trained on."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpost import batch as batches
from jaxpost import (
    compact,
    logps,
    loss_weights,
    optimizers,
    rewards,
    rollout,
    train_step,
)
from jaxpost.data.prompts import Prompt, PromptConfig
from jaxpost.models.model import Model
from jaxpost.options import check_ranges, option
from jaxpost.recipes import setup
from jaxpost.rollout import Rollout, shapes
from jaxpost.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How many completions of what length, and how they are drawn."""

    prompts: int = option(16, "prompts of a rollout", least=1)
    completions: int = option(8, "completions of each prompt", least=1)
    max_new_tokens: int = option(256, "length of a completion at most", "tokens", least=1)
    temperature: float = option(1.0, "of the distribution that is sampled and trained", above=0)
    top_k: int | None = option(None, "sample among the k most probable tokens only", least=1)
    top_p: float | None = option(
        None, "sample among the most probable tokens of mass p only", above=0, most=1
    )
    min_p: float | None = option(
        None, "sample no token under this part of the highest probability", least=0, most=1
    )
    stop_strings: tuple[str, ...] = option((), "texts that end a completion, and belong to it")
    slots: int | None = option(
        None, "completions sampled at once, as memory allows; null: all of a rollout", least=1
    )
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None = option(
        None, "type of cached keys and values; null: the activations'"
    )
    staleness: int = option(
        0,
        "rollouts sampled ahead of the one that is trained on, so that rewards come meanwhile; "
        "1: one step off",
        "rollouts",
        least=0,
    )
    spare: int = option(
        0,
        "prompts sampled besides; a rollout ends when `prompts` are done, and what is not goes on "
        "in the next (partial rollouts)",
        least=0,
    )
    stale_after: int | None = option(
        None,
        "tokens drawn by a policy that so many rollouts were trained on since are trained, older "
        "ones are only read; null: all are trained",
        "rollouts",
        least=0,
    )

    def __post_init__(self):
        check_ranges(self, "rollout.")
        if self.stale_after is not None and not self.off_policy:
            raise ValueError(
                "rollout.stale_after is for tokens of earlier policies, which there are with "
                "rollout.staleness or rollout.spare"
            )
        if self.stale_after is not None and not self.spare and self.stale_after < self.staleness:
            raise ValueError(
                f"every token is trained {self.staleness} rollouts late (rollout.staleness), and "
                f"none later than {self.stale_after} (rollout.stale_after): nothing would be "
                "trained; leave rollout.stale_after out"
            )
        if "" in self.stop_strings:
            raise ValueError("rollout.stop_strings holds an empty text, which is in every text")

    @property
    def off_policy(self) -> bool:
        """Whether tokens may come from an earlier policy than that before the update."""
        return self.staleness > 0 or self.spare > 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return any(each is not None for each in (self.top_k, self.top_p, self.min_p))

    @property
    def rows(self) -> int:
        """Completions of a rollout."""
        return self.prompts * self.completions

    def distribution(self) -> dict[str, Any]:
        """What the sampler draws from and the trainer scores with."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names}


def check_groups(sampling: RolloutConfig) -> None:
    """Raises ValueError for groups of one."""
    if sampling.completions < 2:
        raise ValueError(
            "rollout.completions is 1: a group of one has no baseline; sample 2 or more"
        )


def check_importance(sampling: RolloutConfig, importance: str) -> None:
    """Raises ValueError where stale tokens would be taken for the policy's own."""
    if sampling.off_policy and importance == "none":
        raise ValueError(
            "rollout.staleness and rollout.spare train on tokens of earlier policies: correct for "
            "that with importance: truncated (or banded)"
        )


def check_parts(sampling: RolloutConfig, minibatches: int, microbatches: int) -> None:
    """Raises ValueError where a rollout cannot be divided into updates, or these into parts."""
    train_step.check_microbatches(sampling.rows, minibatches)
    train_step.check_microbatches(sampling.rows // minibatches, microbatches)


def that_fit(config: PromptConfig, sampling: RolloutConfig, model: Model) -> PromptConfig:
    """The data without prompts after which the model has no room for a completion.

    Raises:
      ValueError: it has no room for a completion at all.
    """
    room = model.config.max_positions - sampling.max_new_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_new_tokens is {sampling.max_new_tokens}, and the model has "
            f"{model.config.max_positions} positions for prompt and completion; make it smaller"
        )
    return dataclasses.replace(config, max_prompt_tokens=min(config.max_prompt_tokens, room))


class Experience(NamedTuple):
    """Completions and their rewards, prompt-major: row p · G + g is completion g of prompt p.

    Attributes:
      prompts: [P].
      rollout: [P·G, N].
      texts: [P·G], without the stop token.
      scored: [P·G].
      staleness: [P·G, N], rollouts that the policy was trained on since it drew a token.
    """

    prompts: Sequence[Prompt]
    rollout: Rollout
    texts: Sequence[str]
    scored: Sequence[rewards.Scored]
    staleness: np.ndarray

    @property
    def completions(self) -> int:
        """G."""
        return len(self.texts) // len(self.prompts)

    @property
    def rewards(self) -> np.ndarray:
        """[P, G], NaN where there is none."""
        values = [scored.value for scored in self.scored]
        return np.array(values, np.float32).reshape(len(self.prompts), -1)

    @property
    def lengths(self) -> np.ndarray:
        """[P, G], tokens."""
        return self.rollout.lengths.reshape(len(self.prompts), -1)

    @property
    def truncated(self) -> np.ndarray:
        """[P, G], whether a completion ended because it was long."""
        ended = self.rollout.stop_reasons == rollout.LENGTH
        return ended.reshape(len(self.prompts), -1)

    def groups(self, chosen: Sequence[int]) -> "Experience":
        """Only some of the prompts, with all their completions."""
        rows = [p * self.completions + g for p in chosen for g in range(self.completions)]
        return Experience(
            [self.prompts[p] for p in chosen],
            Rollout(*(field[rows] for field in self.rollout)),
            [self.texts[row] for row in rows],
            [self.scored[row] for row in rows],
            self.staleness[rows],
        )


def join(parts: Sequence[Experience]) -> Experience:
    """Several rollouts as one."""
    return Experience(
        [prompt for part in parts for prompt in part.prompts],
        Rollout(
            *(np.concatenate(field) for field in zip(*(p.rollout for p in parts), strict=True))
        ),
        [text for part in parts for text in part.texts],
        [scored for part in parts for scored in part.scored],
        np.concatenate([part.staleness for part in parts]),
    )


class Rows(NamedTuple):
    """Completions after their prompts as rows: a `TokenBatch` [B, T] and more of each token."""

    inputs: Any
    targets: Any
    completion_mask: Any
    loss_weights: Any
    segment_ids: Any
    positions: Any
    sampler_logps: Any
    staleness: Any


def rows_of(experience: Experience, stale_after: int | None = None) -> Rows:
    """One row a completion, T rounded up to few sizes; weights are 1 on its tokens, else 0.

    With `stale_after` they are 0 on tokens that are staler.
    """
    sequences, drawn = [], experience.rollout
    for row, length in enumerate(drawn.lengths.tolist()):
        prompt = experience.prompts[row // experience.completions].tokens
        chosen = np.repeat([False, True], [len(prompt), length])
        tokens = np.concatenate([prompt, drawn.tokens[row, :length]]).astype(np.int32)
        sequences.append(batches.shift(batches.Example(tokens, chosen, chosen.astype(np.float32))))
    width = shapes.bucket_length(max(len(sequence.inputs) for sequence in sequences))
    batch = batches.stack([batches.row_of([sequence], width) for sequence in sequences])
    sampled = np.zeros(batch.inputs.shape, np.float32)
    stale = np.zeros_like(sampled)
    sampled[batch.completion_mask] = drawn.logps[drawn.mask]
    stale[batch.completion_mask] = experience.staleness[drawn.mask]
    if stale_after is not None:
        batch = batch._replace(loss_weights=batch.loss_weights * (stale <= stale_after))
    return Rows(*batch, sampler_logps=sampled, staleness=stale)


def score_settings(config: RolloutConfig, model: Model) -> logps.Settings:
    """Of the distribution that is sampled, with its entropy."""
    return logps.Settings(
        **config.distribution(),
        softcap=model.config.final_softcap,
        chunk=logps.CHUNK_TOKENS,
        entropies=True,
    )


Importance = Literal["none", "truncated", "banded"]


def correction(importance: Importance, old_logps: Array, sampler_logps: Array) -> Array | float:
    """What loss weights are multiplied with, where a token was not drawn by the policy itself."""
    if importance == "none":
        return 1.0
    factor = {
        "truncated": loss_weights.truncated_importance,
        "banded": loss_weights.banded_importance,
    }[importance]
    return factor(old_logps, sampler_logps)


def make_scores(
    model: Model, config: RolloutConfig, microbatches: int
) -> Callable[[Params, Rows], Array]:
    """`(params, rows) -> logps [B, T]` of the distribution that is sampled."""
    settings = score_settings(config, model)._replace(entropies=False)

    def scores(params: Params, part: Read) -> Array:
        hidden = compact.hidden(model, params, part.read)
        head = model.head(params)
        return logps.score_hidden(hidden, head, part.targets, part.completion_mask, settings).logps

    return in_parts(scores, model, microbatches)


class Read(NamedTuple):
    """What a target's score depends on; `read` is a `compact.Plain` or `Layout` of tokens."""

    read: Any
    targets: Any
    completion_mask: Any


def in_parts(
    function: Callable[[Params, Read], Array], model: Model, microbatches: int
) -> Callable[[Params, Any], Array]:
    """`(params, rows) -> [B, T]` by a jitted function of each microbatch, prompts read once."""

    @jax.jit
    def run(params: Params, batch: Read) -> Array:
        parts = train_step.split(batch, microbatches)
        found = jax.lax.map(lambda part: function(params, part), parts)
        return jnp.moveaxis(found, 0, 1).reshape(-1, found.shape[-1])

    def whole(params: Params, rows: Any) -> Array:
        batch = Read(plain(rows), rows.targets, rows.completion_mask)
        order, batch = laid_out(batch, microbatches, model)
        return run(params, batch)[np.argsort(order)]

    return whole


def plain(rows: Any) -> compact.Plain:
    """The rows to read as they are."""
    return compact.Plain(rows.inputs, rows.segment_ids, rows.positions)


def laid_out(batch: Any, microbatches: int, model: Model) -> tuple[np.ndarray, Any]:
    """(an order, the batch with its rows in it), and `read` as each microbatch's `Layout`."""
    width = model.config.width
    order, layout = compact.lay_out(batch.read, batch.completion_mask, microbatches, width)
    batch = jax.tree.map(lambda x: x[order], batch._replace(read=None))
    return order, batch._replace(read=train_step.Divided(layout))


def starting_point(policy: setup.Policy) -> Params:
    """A copy of what will be trained, as the reference: all parameters, or the adapters alone."""
    chosen = train_step.select(policy.params, policy.trainable)
    return jax.tree.map(lambda p: jnp.array(p, copy=True), chosen)


def passes(batch: Any, config: Any, key: Array, model: Model) -> Iterator[Any]:
    """Every pass's minibatches, equal shares of the rows, laid out for reading.

    Each pass takes the prompts in another order; the completions of one are neighbours, and so
    mostly in one minibatch, where their prompt is read once. A single share keeps the order.

    `config` is a recipe's: `rollout`, `epochs`, `minibatches`, `microbatches`.
    """
    for epoch in range(config.epochs):
        groups = np.arange(len(batch.targets)).reshape(config.rollout.prompts, -1)
        if config.minibatches > 1:
            order = jax.random.permutation(jax.random.fold_in(key, epoch), len(groups))
            groups = groups[np.asarray(order)]
        for chosen in groups.reshape(config.minibatches, -1):
            part = jax.tree.map(lambda x, chosen=chosen: x[chosen], batch)
            yield laid_out(part, config.microbatches, model)[1]


class Together:
    """Several sources of state, by name, as one."""

    def __init__(self, parts: Mapping[str, setup.Source]):
        self._parts = parts

    def get_state(self) -> dict[str, Any]:
        return {name: part.get_state() for name, part in self._parts.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.set_state(state[name])


def restarted(
    state: train_step.TrainState, optimizer: optax.GradientTransformation, trainable: Any
) -> train_step.TrainState:
    """The state with its optimizer as at the start, the learning rate's schedule aside."""
    chosen = train_step.select(state.params, trainable)
    return state._replace(opt_state=optimizers.restarted(optimizer, state.opt_state, chosen))
