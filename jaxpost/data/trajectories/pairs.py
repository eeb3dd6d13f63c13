"""Sessions of one task to pairs: whole (ETO), from a branch on (IPR, HPL), by segments (SDPO)."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpost.data.rows import Dropped, Message, Note
from jaxpost.data.trajectories.sessions import Session

Found = Iterator["Pair | Dropped | Note"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """What was said after the same messages, by the better session and by the worse.

    Attributes:
      split: how many messages the two have in common, which are the prompt.
      winner_end: the winner's messages end before this one; alike `loser_end`.
      scores: of the two sides, where they are single numbers.
      columns: further columns of the row.
    """

    winner: Session
    loser: Session
    split: int
    winner_end: int
    loser_end: int
    scores: tuple[float, float] | None = None
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def chosen(self) -> Sequence[Message]:
        """The winner's messages after the split."""
        return self.winner.messages[self.split : self.winner_end]

    @property
    def rejected(self) -> Sequence[Message]:
        """The loser's."""
        return self.loser.messages[self.split : self.loser_end]

    def row(self) -> dict[str, Any]:
        """As a preference recipe reads it.

        `first_turn` is the number of the first turn compared, `chosen_turns` and `rejected_turns`
        count the turns of each session up to the end of its side (the t and T of DMPO's weights).
        """
        turns = (turns_in(self.winner, self.winner_end), turns_in(self.loser, self.loser_end))
        row = {
            "prompt": self.winner.messages[: self.split],
            "chosen": self.chosen,
            "rejected": self.rejected,
            **self.winner.extras,
        }
        if self.scores is not None and self.scores[0] > self.scores[1]:
            row |= {"score_chosen": self.scores[0], "score_rejected": self.scores[1]}
        row |= {"first_turn": turns_in(self.winner, self.split)}
        row |= {"chosen_turns": turns[0], "rejected_turns": turns[1], **self.columns}
        return row | origin(self.winner, self.loser)


# Builders ------------------------------------------------------------------------------------


def trajectory_pairs(
    sessions: Sequence[Session],
    *,
    least: float = -float("inf"),
    worst: bool = False,
    whole: bool = False,
) -> Found:
    """The best session of a task against each that is worse, or only against the worst.

    Args:
      sessions: of one task.
      least: the reward that the best must have.
      whole: what two sessions share in the beginning is on both sides, and not in the prompt.
    """
    yield from (Dropped("branched", one.where) for one in sessions if one.branch)
    found = [one for one in sessions if not one.branch and one.reward is not None]
    if not found:
        return
    best = max(found, key=rank)
    if rank(best)[0] < least:
        yield from (Dropped("no_expert", one.where) for one in found)
        return
    if len(found) == 1:
        yield Dropped("alone", best.where)
    lowest = min(map(rank, found))
    for loser in found:
        if loser is best:
            continue
        if rank(loser) == rank(best):
            yield Dropped("tie", loser.where)
        elif worst and rank(loser) != lowest:
            yield Dropped("not_worst", loser.where)
        else:
            yield whole_pair(best, loser, whole)


def whole_pair(winner: Session, loser: Session, whole: bool = False) -> Pair | Dropped:
    """Two sessions of a task; what they share in the beginning is the prompt, unless `whole`.

    Where they differ first in a partner's turn, the agent's turn before it is compared too: it is
    the same in both, so the prompt still ends before a turn of the agent.
    """
    split = first_difference(winner.messages, loser.messages)
    split = min(split, winner.turns[0]) if whole else split
    heads = (winner.turns, loser.turns)
    if not all(split in turns for turns in heads):
        split = max((turn for turn in winner.turns if turn < split), default=-1)
    if split < 0:
        return Dropped("prompts_differ", loser.where)
    return checked(pair_of(winner, loser, split))


def suffix_pairs(sessions: Sequence[Session], *, least: float = -float("inf")) -> Found:
    """The expert's session from turn t on against each one begun there (IPR; HPL's steps).

    The expert is the best session of the task that branches off no other. Both suffixes are whole.
    """
    expert, others = expert_of(sessions, least)
    if expert is None:
        yield from others
        return
    for loser in others:
        if isinstance(loser, Dropped):
            yield loser
        elif loser.reward is None:
            yield Dropped("no_reward", loser.where)
        elif rank(loser) >= rank(expert):
            yield Dropped("tie" if rank(loser) == rank(expert) else "not_worse", loser.where)
        else:
            yield checked(pair_of(expert, loser, expert.turns[loser.branch or 0]))
    yield from missing(expert, range(len(expert.turns)), others)


def segment_pairs(sessions: Sequence[Session]) -> Found:
    """Sessions with an error turn e against the best session begun from the history before e.

    Both segments begin at e, end at `end_turn` and are cut to the same number of turns (SDPO,
    arXiv 2501.01821); what they share in the beginning is read with the prompt.
    """
    wrong = [one for one in sessions if one.error_turn is not None]
    winners = []
    for loser in wrong:
        found = [one for one in sessions if one is not loser and one.reward is not None]
        start = loser.turns[loser.error_turn or 0]
        found = [one for one in found if first_difference(one.messages, loser.messages) >= start]
        best = max(found, key=rank, default=None)
        if best is None:
            yield Dropped("history_differs", loser.where)
        elif loser.reward is None:
            yield Dropped("no_reward", loser.where)
        elif rank(best) <= rank(loser):
            yield Dropped("tie" if rank(best) == rank(loser) else "not_worse", loser.where)
        else:
            winners.append(best)
            yield from segment_pair(best, loser)
    for one in sessions:
        if one.error_turn is None and not any(one is winner for winner in winners):
            yield Dropped("not_best" if wrong else "no_error_turn", one.where)


def segment_pair(winner: Session, loser: Session) -> Found:
    """The segments of two sessions from the loser's error turn on."""
    start = loser.error_turn or 0
    counts = [segment_end(one) - start for one in (winner, loser)]
    count = min(counts)
    if count < 1:
        yield Dropped("no_turns", loser.where)
        return
    ends = [one.turns[start + count - 1] + 1 for one in (winner, loser)]
    split = first_difference(winner.messages[: ends[0]], loser.messages[: ends[1]])
    if split == min(ends):
        yield Dropped("identical", loser.where)
    elif split not in winner.turns or split not in loser.turns:
        yield Dropped("partner_differs", loser.where)
    else:
        if counts[0] != counts[1]:
            yield Note("cut_segment", loser.where)
        columns = {"error_turn": start, "segment_turns": count}
        yield checked(pair_of(winner, loser, split, *ends, columns=columns))


# Parts ---------------------------------------------------------------------------------------


def rank(session: Session) -> tuple[float, ...]:
    """The reward; of a part of a session, less than any."""
    return session.reward if session.reward is not None else (-float("inf"),)


def first_difference(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two sessions have in common from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def expert_of(sessions: Sequence[Session], least: float) -> tuple[Session | None, list[Any]]:
    """The expert, and the sessions that branch off it or (`Dropped`) do not."""
    whole = [one for one in sessions if one.branch is None]
    expert = max(whole, key=rank, default=None)
    if expert is None or rank(expert)[0] < least:
        return None, [Dropped("no_expert", one.where) for one in sessions]
    others = [one for one in sessions if one is not expert]
    return expert, [branching(expert, one) for one in others]


def branching(expert: Session, other: Session) -> Session | Dropped:
    """A session, if it has the expert's messages up to its branch."""
    if other.branch is None:
        return Dropped("not_expert", other.where)
    turns, branch = expert.turns, other.branch
    start = other.turns[branch]
    same = first_difference(expert.messages, other.messages) >= start
    known = branch < len(turns) and turns[branch] == start
    return other if same and known else Dropped("history_differs", other.where)


def missing(expert: Session, starts: Iterable[int], others: Sequence[Any]) -> Iterator[Dropped]:
    """The expert's turns at which no session branches off."""
    known = {one.branch for one in others if isinstance(one, Session)}
    for start in starts:
        if start not in known:
            yield Dropped("no_branch", f"{expert.where} turn {start}")


def pair_of(
    winner: Session,
    loser: Session,
    split: int,
    winner_end: int | None = None,
    loser_end: int | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Pair:
    """A pair; a side ends with its last turn unless told earlier."""
    return Pair(
        winner,
        loser,
        split,
        winner.turns[-1] + 1 if winner_end is None else winner_end,
        loser.turns[-1] + 1 if loser_end is None else loser_end,
        scores_of(winner, loser),
        columns or {},
    )


def scores_of(winner: Session, loser: Session) -> tuple[float, float] | None:
    """The first numbers of both rewards."""
    if winner.reward is None or loser.reward is None:
        return None
    return winner.reward[0], loser.reward[0]


def checked(pair: Pair) -> Pair | Dropped:
    """The pair, unless there is nothing before it or nothing to tell its sides apart."""
    if pair.split == 0:
        return Dropped("empty_prompt", pair.loser.where)
    if pair.winner.extras != pair.loser.extras:
        return Dropped("prompts_differ", pair.loser.where)
    if agent_words(pair.chosen) == agent_words(pair.rejected):
        return Dropped("identical", pair.loser.where)
    return pair


def origin(*rows: Any) -> dict[str, Any]:
    """The task, where it has a name, and where the rows stand."""
    named = {} if rows[0].task is None else {"task": rows[0].task}
    return {**named, "from": [row.where for row in rows]}


def agent_words(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The agent's messages, all white space in their texts alike."""
    return [
        {key: normalised(value) for key, value in message.items()}
        for message in messages
        if message["role"] == "assistant"
    ]


def normalised(value: Any) -> Any:
    """Text with single spaces and none at its ends."""
    return " ".join(value.split()) if isinstance(value, str) else value


def turns_in(session: Session, end: int) -> int:
    """How many turns stand before a message."""
    return sum(turn < end for turn in session.turns)


def segment_end(session: Session) -> int:
    """The number of the turn after the segment's last."""
    return len(session.turns) if session.end_turn is None else session.end_turn + 1
