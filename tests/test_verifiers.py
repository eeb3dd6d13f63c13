"""Logic and chess: the puzzle and the rules decide, not one stored answer."""

import time

import pytest

from jaxpost.rewards import chess, formulas, logic, spans

# 0 says "1 is a knave", 1 says "0 is a knave or I am a knight": a knave and a knight will do.
LIARS = {
    "names": ["Zoey", "Oliver"],
    "statements": "(('lying', 1), ('or', ('lying', 0), ('telling-truth', 1)))",
}
# Each says that the other is of their own kind: both knights, or both knaves.
TWINS = {
    "names": ["Zoey", "Oliver"],
    "statements": [["<=>", ["telling-truth", 0], ["telling-truth", 1]]] * 2,
}
SMT = """
(declare-datatypes ((Colour 0)) (((red) (green) (blue))))
(declare-const a Int) (declare-const b Int) (declare-const half Real)
(declare-const hat Colour) (declare-const rain Bool)
(assert (= (+ a b) 10)) (assert (< a b)) (assert (= (* 2 half) a))
(assert (distinct hat red)) (assert rain)
"""
MATE = {"fen": "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1", "best_move": "d1d8"}
PAWN = {"fen": "8/P6k/8/8/8/8/8/K7 w - - 0 1", "answer": ["a8=Q", "a8=R"]}
CASTLE = {"fen": "4k3/8/8/8/8/8/8/4K2R w K - 0 1", "best_move": "O-O"}


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("(1) Zoey is a knave\n(2) Oliver is a knight", 1, "right"),
        ("<think>Zoey is a knight?</think> Zoey is a **knave**, Oliver: knight.", 1, "right"),
        ("Zoey is a knight, Oliver is a knight", 0, "wrong"),
        ("Zoey is a knave", 0, "unparsable"),
        ("Zoey is a knave or Zoey is a knight, Oliver is a knight", 0, "unparsable"),
        ("<think>Zoey is a knave, Oliver is a knight", 0, "unparsable"),
    ],
)
def test_knights_and_knaves(text, value, reason):
    score = logic.verify(text, LIARS)
    assert (score.value, score.reason) == (value, reason)


def test_any_solution_of_a_puzzle_is_right():
    both = [
        f"<answer>Zoey is a {kind}. Oliver is a knight.</answer>" for kind in ("knight", "knave")
    ]
    said = ["Zoey is a knight, Oliver is a knight", "Zoey is a knave, Oliver is a knight"]
    assert [logic.verify(text, TWINS).value for text in (*both, *said)] == [1, 0, 1, 0]


def test_a_puzzle_without_a_solution_is_masked():
    paradox = {"names": ["A"], "statements": [["lying", 0]]}
    assert logic.verify("A is a knight", paradox).value is None
    assert (
        logic.satisfies("x = 1", {"smtlib": "(declare-const x Int)(assert (< x x))"}).value is None
    )


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("<think>t</think>\n<answer>Zoey is a knave, Oliver is a knight</answer>", 3),
        ("t</think><answer>Zoey is a knave, Oliver is a knight</answer>", 3),
        ("<think>t</think><answer>Zoey is a knave, Oliver is a knave</answer>", -0.5),
        ("<think>t</think><answer>I do not know</answer>", -1),
        ("<answer>Zoey is a knave, Oliver is a knight</answer>", -3),
        ("<answer>Zoey is a knave, Oliver is a knight</answer><think>t</think>", -3),
        ("<think>t</think><answer>Zoey is a knave, Oliver is a knight</answer><answer>a", -3),
    ],
)
def test_logic_rl_totals(text, total):
    score = logic.logic_rl(text, LIARS)
    assert score.value == total == sum(score.parts.values())


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ('{"a": 1, "b": 9, "half": 0.5, "hat": "green", "rain": true}', 1, "right"),
        ('```json\n{"a": 2, "b": 8, "half": 1, "hat": "blue", "rain": true}\n```', 1, "right"),
        ("a = 3\nb = 7\nhalf = 3/2\nhat is Green\nrain: yes", 1, "right"),
        ("a=9, b=1, half=4.5, hat=green, rain=true", 0, "wrong"),
        ("a=1, b=9, half=0.5, hat=green", 0, "incomplete"),
        ("a=1, a=2, b=9, half=0.5, hat=green, rain=true", 0, "unparsable"),
        ("a=1, b=9, half=1/0, hat=green, rain=true", 0, "unparsable"),
        ("a=1, b=9, half=0.5, hat=pink, rain=true", 0, "unparsable"),
        ("a=1.5, b=8.5, half=0.75, hat=green, rain=true", 0, "unparsable"),
        ("[" * 5000, 0, "unparsable"),
        ("", 0, "unparsable"),
    ],
)
def test_constraints_are_satisfied_by_any_solution(text, value, reason):
    score = logic.satisfies(text, {"constraints": SMT})
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    "text", ["*" * 20_000, "a = " + " " * 19_000 + "b c", "a" + "-is" * 6_000 + " b c"]
)
def test_assignments_are_read_in_linear_time(text):
    start = time.process_time()
    assert logic.satisfies(text, {"constraints": SMT}).value == 0
    assert time.process_time() - start < 2


def test_constraints_that_are_none_say_so():
    with pytest.raises(ValueError, match="not SMT-LIB 2"):
        logic.satisfies("a = 1", {"constraints": "(assert (= a 1))"})
    with pytest.raises(KeyError, match="constraints"):
        logic.satisfies("a = 1", {"puzzle": ""})


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("Rd8#", 1, "right"),
        ("<answer>d1d8</answer>", 1, "right"),
        ("<think>Rd7?</think> 1. Rd8 wins.", 1, "right"),
        ("Rd7", -1, "wrong"),
        ("d1d7", -1, "wrong"),
        ("Rd9", -2, "unparsable"),
        ("e2e4", -2, "illegal"),
        ("O-O", -2, "illegal"),
        ("Rd8 or Kf1", -2, "several moves"),
        ("", -2, "unparsable"),
    ],
)
def test_chess_r1_scores(text, value, reason):
    score = chess.chess_r1(text, MATE)
    assert (score.value, score.reason) == (value, reason)
    assert chess.verify(text, MATE).value == (value == 1)
    assert chess.legal(text, MATE).value == (value > -2)


@pytest.mark.parametrize("text", ["a8=Q", "a7a8q", "a8Q", "a7a8=R"])
def test_promotions_in_san_and_uci(text):
    assert chess.verify(text, PAWN).value == 1
    assert chess.verify("a8=N", PAWN).value == 0
    assert chess.legal("a7a8", PAWN).value == 0


@pytest.mark.parametrize("text", ["O-O", "0-0", "e1g1"])
def test_castling_is_read(text):
    assert chess.verify(text, CASTLE).value == 1


def test_any_mate_is_best():
    ladder = {"fen": "6k1/R7/1R6/8/8/8/8/2Q3K1 w - - 0 1", "best_move": "Rb8#"}
    assert [chess.verify(text, ladder).value for text in ("Rb8", "Qc8", "Ra8")] == [1, 1, 0]


def test_the_worth_of_a_move():
    row = {**MATE, "values": {"Rd8": 1.0, "d1d7": 0.4}}
    assert [chess.value(text, row).value for text in ("d1d8", "Rd7", "Kf1", "Rh9")] == [
        1,
        0.4,
        None,
        -2,
    ]


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("1. f3 e5 2. g4 Qh4#", 1, "right"),
        ("f2f3 e7e5 g2g4 d8h4", 1, "right"),
        ("1. e4 f6 2. d4 g5 3. Qh5#", 0, "wrong"),
        ("1. f3 e5", 0, "unfinished"),
        ("1. f3 e5 2. g4 Qh5#", 0, "illegal"),
        ("1. f3 e5 2. g4 Qh4# 3. e4", 0, "illegal"),
    ],
)
def test_a_game_is_played_to_its_result(text, value, reason):
    score = chess.game(text, {"result": "0-1"})
    assert (score.value, score.reason) == (value, reason)


def test_the_result_of_a_game_is_what_the_board_says():
    mate = {"moves": "1. f3 e5 2. g4 Qh4#"}
    named = ("Black won: 0-1.", "1-0", "1-0 or 0-1", "")
    assert [chess.result(text, mate).value for text in named] == [1, 0, 0, 0]
    assert chess.result("*", {"moves": ["f3", "e5"]}).value == 1


def test_chess_rows_that_are_wrong_say_so():
    with pytest.raises(ValueError, match="no possible position"):
        chess.verify("e4", {"fen": "8/8/8/8/8/8/8/8 w - - 0 1", "best_move": "e4"})
    with pytest.raises(ValueError, match="illegal"):
        chess.verify("e4", {"best_move": "e5"})
    with pytest.raises(ValueError, match="result is"):
        chess.game("e4", {"result": "white"})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("<answer> 1 </answer> or <answer>2</answer>", "2"),
        ("<think><answer>1</answer></think> 2", "2"),
        ("<think>never closed <answer>1</answer>", ""),
        ("<answer>a <answer>b</answer>", "b"),
    ],
)
def test_where_an_answer_stands(text, answer):
    assert spans.answer(text) == answer


@pytest.mark.parametrize("text", ["(1 + 2) * 3 / 4", "2**10", "-3.5", "2**(1/2)", "2**-3"])
def test_arithmetic_passes(text):
    assert formulas.refuses(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "9**9**9**9",
            "9**(9*9)",
            "((9**999)**999)",
            "9**1e9",
            "(" * 500,
            "1;2",
            "x",
            "f(1)",
            "'a'",
        ),
        *("().__class__", "[1]", "1 if 1 else 2", "lambda: 1", "True", "1j", "9" * 3000, ""),
    ],
)
def test_more_than_arithmetic_is_refused(text):
    assert formulas.refuses(text)


def test_formulas_with_names():
    passes = ["x**2/2 + C", "exp(2*x) + log(x)", "E**(-x**2)", "x**(1/2)"]
    refused = [
        "x**(9**9)*y",
        "(x + C + E)**500",
        "9**(0*x + 999)",
        "exit(1)",
        "sin(x, 1)",
        "x.args",
    ]
    assert not any(
        formulas.refuses(text, {"x", "C", "E"}, {"exp", "log", "sin"}) for text in passes
    )
    assert all(formulas.refuses(text, {"x", "C", "E"}, {"exp", "log", "sin"}) for text in refused)
    assert formulas.refuses("a*b + z", {"a-z"}) is None
    assert formulas.is_literal("[[1, 'a'], (2,)]")
    assert not formulas.is_literal("exit()")
