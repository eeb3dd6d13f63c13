"""Chess answers, judged by the rules of python-chess. Moves may be SAN (`Nxe5+`) or UCI (`f3e5`).

The examples: `fen` (the position; the starting one where it is left out), and what each verifier
names. A move is read from the answer; one with several different moves has none.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import gold, score, spans

try:
    import chess
except ImportError as error:
    raise ImportError("python-chess is not installed; pip install 'jaxpost[rewards]'") from error

SQUARE = "[a-h][1-8]"
MOVE = re.compile(
    rf"(?<![\w-])({SQUARE}-?{SQUARE}=?[qrbnQRBN]?|[O0]-[O0](?:-[O0])?"
    rf"|[KQRBN][a-h]?[1-8]?x?{SQUARE}|(?:[a-h]x)?{SQUARE}(?:=?[QRBN])?)[+#]?(?![\w-])"
)
OUTCOME = re.compile(r"(?<![\w/-])(1-0|0-1|1/2-1/2|½-½|\*)(?![\w/-])")
LONGEST = 600  # moves of a game


def legal(completion: str, example: Mapping[str, Any]) -> score.Score:
    """1 for a legal move of the position, else 0."""
    return best_of(completion, example, illegal=0.0, legal=1.0, best=1.0, right=())


def verify(completion: str, example: Mapping[str, Any]) -> score.Score:
    """1 for the best move, else 0. See `chess_r1`."""
    return chess_r1(completion, example, illegal=0.0, legal=0.0, best=1.0)


def chess_r1(
    completion: str,
    example: Mapping[str, Any],
    *,
    illegal: float = -2.0,
    legal: float = -1.0,
    best: float = 1.0,
) -> score.Score:
    """Chess-R1's scores. `best_move` (else the gold column): a move or a list of them.

    A move that mates is as good as the best, whichever it is.
    """
    wanted = example["best_move"] if example.get("best_move") else gold.gold(example)
    right = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    return best_of(completion, example, illegal=illegal, legal=legal, best=best, right=right)


def value(completion: str, example: Mapping[str, Any], *, illegal: float = -2.0) -> score.Score:
    """The worth of the move in `values`, {move: number in [0, 1]}; None for a legal move of no
    known worth.
    """
    board = position(example)
    move = only_move(board, spans.answer(completion))
    if isinstance(move, str):
        return score.Score(illegal, {"legal": 0.0}, move)
    worth = {read(board, name): float(number) for name, number in example["values"].items()}
    known = move in worth
    return score.Score(worth.get(move), {"legal": 1.0}, "legal" if known else "no known worth")


def game(completion: str, example: Mapping[str, Any]) -> score.Score:
    """1 where the answer's moves, played from the position, are legal and end as `result` says.

    `result`: 1-0, 0-1 or 1/2-1/2 (else the gold column). The board says how the game ended, by
    mate, stalemate, too little material, or the draws that need no claim.
    """
    wanted, board = result_of(example), position(example)
    for text in MOVE.findall(spans.answer(completion))[:LONGEST]:
        move = read(board, text) if board.outcome() is None else None
        if move is None:
            return score.Score(0.0, {"legal": 0.0}, "illegal")
        board.push(move)
    ended = board.outcome()
    right = ended is not None and ended.result() == wanted
    reason = "right" if right else "wrong" if ended else "unfinished"
    return score.Score(float(right), {"legal": 1.0}, reason)


def result(completion: str, example: Mapping[str, Any]) -> score.Score:
    """1 where the answer names how the example's own game (`moves`: text or a list) ended.

    "*" is the right answer where it has not ended. Raises ValueError where a move is illegal.
    """
    board, moves = position(example), example["moves"]
    for text in MOVE.findall(moves) if isinstance(moves, str) else moves:
        move = read(board, text)
        if move is None:
            raise ValueError(f"moves: {text} is illegal in {board.fen()}")
        board.push(move)
    named = {text.replace("½", "1/2") for text in OUTCOME.findall(spans.answer(completion))}
    if len(named) != 1:
        return score.Score(0.0, {}, "several results" if named else "unparsable")
    right = named == {board.result()}
    return score.Score(float(right), {}, "right" if right else "wrong")


def best_of(
    completion: str,
    example: Mapping[str, Any],
    *,
    illegal: float,
    legal: float,
    best: float,
    right: tuple[str, ...],
) -> score.Score:
    board = position(example)
    moves = {read(board, text) for text in right}
    if None in moves:
        raise ValueError(f"a best move of {', '.join(right)} is illegal in {board.fen()}")
    move = only_move(board, spans.answer(completion))
    if isinstance(move, str):
        return score.Score(illegal, {"legal": 0.0}, move)
    board.push(move)
    good = not right or move in moves or board.is_checkmate()
    return score.Score(best if good else legal, {"legal": 1.0}, "right" if good else "wrong")


def only_move(board: chess.Board, said: str) -> chess.Move | str:
    """The answer's move, or what is wrong with it."""
    texts = MOVE.findall(said)
    if not texts:
        return "unparsable"
    moves = {read(board, text) for text in texts}
    if len(moves) > 1:
        return "several moves"
    return moves.pop() or "illegal"


def read(board: chess.Board, text: str) -> chess.Move | None:
    """A legal move, by SAN or UCI."""
    text = text.strip().rstrip("+#!?")
    try:
        move = board.parse_san(text.replace("0", "O"))
    except ValueError:
        try:
            move = board.parse_uci(text.replace("-", "").replace("=", "").lower())
        except ValueError:
            return None
    return move if move else None


def position(example: Mapping[str, Any]) -> chess.Board:
    """Raises ValueError for a FEN that is none, or a position that cannot be."""
    board = chess.Board(example.get("fen") or chess.STARTING_FEN)
    if not board.is_valid():
        raise ValueError(f"fen: {board.fen()} is no possible position: {board.status()!r}")
    return board


def result_of(example: Mapping[str, Any]) -> str:
    wanted = str(example["result"] if example.get("result") else gold.gold(example))
    wanted = wanted.strip().replace("½", "1/2")
    if not OUTCOME.fullmatch(wanted):
        raise ValueError(f"result is {wanted!r}; use 1-0, 0-1 or 1/2-1/2")
    return wanted
