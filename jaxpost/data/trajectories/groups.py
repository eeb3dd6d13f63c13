"""Groups of actions: an expert's against a policy's, and their curriculum (HPL, arXiv 2510.03253).

Departures from the paper, which leaves them open: difficulties are D1 [0.7, 1], D2 [0.4, 0.7),
D3 (0, 0.4), lengths (0, 3], (3, 6], (6, ∞); groups whose ΔR is not above 0 are left out.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.data.rows import Dropped
from jaxpost.data.trajectories import pairs
from jaxpost.data.trajectories.sessions import Session

LENGTHS, DIFFICULTIES = (0.0, 3.0, 6.0), (1.0, 0.7, 0.4)
Cut = Callable[[Session], Sequence[int]]
GroupReward = Callable[[Session, int], float | None]


# Where an expert's session is cut: first turns of its groups -----------------------------------


def fixed_number(count: int, groups: int = 3) -> list[int]:
    """`groups` groups of `count` turns, as even as can be; empty ones are passed over."""
    sizes = [len(part) for part in np.array_split(np.arange(count), groups)]
    return sorted({int(start) for start in np.cumsum([0, *sizes[:-1]]) if start < count})


def fixed_size(count: int, size: int = 3) -> list[int]:
    """Groups of `size` turns, the last one maybe shorter."""
    return list(range(0, count, size))


def by_entropy(entropies: Sequence[float], percentile: float = 80) -> list[int]:
    """A group begins where the policy's entropy is above this percentile of the session's."""
    threshold = np.percentile(entropies, percentile)
    return [0] + [t for t, entropy in enumerate(entropies) if t and entropy > threshold]


# Rewards of groups ---------------------------------------------------------------------------


def measured(session: Session, end: int) -> float | None:
    """The reward of the state before turn `end`: the mean of the rollouts from it that there are.

    None where there are none, unless the session ended there: then its own reward.
    """
    returns = session.returns[end - 1] if session.returns is not None else ()
    if returns:
        return math.fsum(returns) / len(returns)
    ended = end == len(session.turns) and session.reward is not None
    return session.reward[0] if ended and session.reward is not None else None


def bucket(
    length: int,
    delta: float,
    *,
    lengths: Sequence[float] = LENGTHS,
    difficulties: Sequence[float] = DIFFICULTIES,
) -> tuple[int, int] | None:
    """(L, D) of B_{L,D}, each from 1; None for a ΔR not above 0.

    Args:
      length: actions in the winner's group.
      delta: ΔR = r(G_w) − r(G_l).
      lengths: rising edges, the first 0; a length at an edge belongs below it.
      difficulties: falling edges, the first the greatest ΔR; a ΔR at an edge belongs above it.

    Raises:
      ValueError: ΔR is above the first edge.
    """
    if delta <= 0:
        return None
    if delta > difficulties[0]:
        raise ValueError(
            f"ΔR is {delta:g}, above the first edge of difficulty {difficulties[0]:g}; set it to "
            "the greatest difference of rewards"
        )
    return (
        sum(length > edge for edge in lengths),
        1 + sum(delta < edge for edge in difficulties[1:]),
    )


def phase(place: tuple[int, int]) -> int:
    """The first phase that trains a bucket: 1 has B11, 2 adds B12 and B21, 3 all others."""
    return min(sum(place) - 1, 3)


# Pairs ---------------------------------------------------------------------------------------


def group_pairs(
    sessions: Sequence[Session],
    cut: Cut,
    *,
    reward: GroupReward = measured,
    least: float = -math.inf,
    lengths: Sequence[float] = LENGTHS,
    difficulties: Sequence[float] = DIFFICULTIES,
    last_phase: int = 3,
) -> pairs.Found:
    """Each group of the expert's turns against as many turns of each session begun there.

    Args:
      sessions: of one task; the expert is as in `suffix_pairs`.
      cut: (expert) → first turns of its groups.
      reward: (session, turn) → the reward expected before that turn, or None.
      least: the reward that the expert must have.
      lengths: see `bucket`; alike `difficulties`.
      last_phase: pairs of later phases are dropped.
    """
    expert, others = pairs.expert_of(sessions, least)
    if expert is None:
        yield from others
        return
    yield from (one for one in others if isinstance(one, Dropped))
    losers = [one for one in others if isinstance(one, Session)]
    starts = list(cut(expert))
    for start, end in zip(starts, [*starts[1:], len(expert.turns)], strict=True):
        for loser in (one for one in losers if one.branch == start):
            found = group_pair(expert, loser, start, end, reward)
            yield placed(found, lengths, difficulties, last_phase)
    yield from pairs.missing(expert, starts, losers)
    yield from (Dropped("no_branch", one.where) for one in losers if one.branch not in starts)


def group_pair(
    expert: Session, loser: Session, start: int, end: int, reward: GroupReward
) -> pairs.Pair | Dropped:
    """Turns `start` to `end` of the expert, and the loser's, of which there may be fewer."""
    ends = (end, min(end, len(loser.turns)))
    if ends[1] <= start:
        return Dropped("group_ended", loser.where)
    won, lost = reward(expert, ends[0]), reward(loser, ends[1])
    if won is None or lost is None:
        return Dropped("no_return", (expert if won is None else loser).where)
    stops = (expert.turns[ends[0] - 1] + 1, loser.turns[ends[1] - 1] + 1)
    pair = pairs.pair_of(expert, loser, expert.turns[start], *stops)
    columns = {"length": end - start, "delta": round(won - lost, 9)}  # 3/5 - 1/5 is on an edge
    return pairs.checked(dataclasses.replace(pair, scores=(won, lost), columns=columns))


def placed(
    pair: pairs.Pair | Dropped,
    lengths: Sequence[float],
    difficulties: Sequence[float],
    last_phase: int,
) -> pairs.Pair | Dropped:
    """The pair with its bucket and phase."""
    if isinstance(pair, Dropped):
        return pair
    length, delta = pair.columns["length"], pair.columns["delta"]
    try:
        place = bucket(length, delta, lengths=lengths, difficulties=difficulties)
    except ValueError as error:
        raise ValueError(f"{pair.winner.where} against {pair.loser.where}: {error}") from error
    if place is None:
        return Dropped("not_better", pair.loser.where)
    if phase(place) > last_phase:
        return Dropped("later_phase", pair.loser.where)
    columns = {**pair.columns, "bucket": list(place), "phase": phase(place)}
    return dataclasses.replace(pair, columns=columns)
