"""Proofs: what the checker accepts for the very statement, and nothing else."""

import shutil

import pytest

from jaxpost.rewards import sandbox, theorems
from jaxpost.rewards.theorems import lean, sources

boxes = [trial for trial in sandbox.probe() if not trial.failure]
needs_coq = pytest.mark.skipif(
    not (boxes and shutil.which("coqchk")), reason="no Coq (apt-get install coq), or no sandbox"
)
needs_lean = pytest.mark.skipif(
    not (boxes and shutil.which("lean")), reason="no Lean 4, or no sandbox"
)
HEADER = "Require Import Arith Lia."
STATEMENT = "Theorem swap : forall a b : nat, a + b = b + a."
COQ = {"language": "coq", "header": HEADER, "statement": STATEMENT}
PROOF = "Proof. intros. lia. Qed."
LEAN = {"language": "lean4", "statement": "theorem swap (a b : Nat) : a + b = b + a := by sorry"}


def after(text: str, proof: str) -> str:
    return f"```coq\n{text}\n{STATEMENT}\n{proof}\n```"


@needs_coq
@pytest.mark.parametrize(
    "proof",
    [
        PROOF,
        f"```coq\n{HEADER}\nLemma h : forall n, n + 0 = n.\n{PROOF}\n{STATEMENT}\n{PROOF}\n```",
        "Proof. (* no admit, no (* Axiom *) here *) intros. lia. Qed.",
    ],
)
def test_a_proof_is_worth_one(proof):
    assert theorems.verify(proof, COQ).value == 1


@needs_coq
def test_axioms_of_the_header_may_be_used():
    real = {
        "language": "coq",
        "header": "Require Import Reals. Open Scope R_scope.",
        "statement": "Theorem least : forall x : R, x <= x.",
    }
    assert theorems.verify("Proof. intro. apply Rle_refl. Qed.", real).value == 1


@needs_coq
@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        ("Proof. intros. Qed.", "wrong"),
        ("I cannot prove it.", "wrong"),
        ("Proof. Abort.", "another statement"),
        (after("Context (absurd : False).", "Proof. destruct absurd. Qed."), "new axioms"),
        (
            after(
                "Require Import Classical.",
                "Proof. intros. destruct (classic (a + b = b + a)); [assumption | lia]. Qed.",
            ),
            "new axioms",
        ),
        (
            after(
                "Inductive nat := O. Definition plus (a b : nat) := O. "
                'Notation "a + b" := (plus a b).',
                "Proof. now intros [] []. Qed.",
            ),
            "another statement",
        ),
    ],
)
def test_what_the_checker_refuses(proof, reason):
    score = theorems.verify(proof, COQ)
    assert (score.value, score.reason) == (0, reason)


@needs_coq
def test_a_proof_that_takes_too_long_is_worth_nothing():
    forever = "Proof. repeat (assert True by exact I). Qed."
    assert theorems.verify(forever, COQ, seconds=3).reason in ("timeout", "memory")


@needs_coq
def test_a_statement_that_does_not_compile_is_masked():
    nonsense = {"language": "coq", "statement": "Theorem nonsense : Nonsense."}
    assert theorems.verify("Proof. exact I. Qed.", nonsense).value is None


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        ("Proof. Admitted.", "forbidden: Admitted"),
        ("Proof. intros. admit. Qed.", "forbidden: admit"),
        ('Definition s := "(*"%string. Axiom a : False. (* "*)" *)', "forbidden: Axiom"),
        (after("Unset Guard Checking.", PROOF), "forbidden: Checking"),
        (
            after("#[bypass_check(guard)] Fixpoint f (n : nat) : False := f n.", ""),
            "forbidden: bypass_check",
        ),
        (PROOF + ' Redirect "Reference.v" Print nat.', "forbidden: Redirect"),
        ("Theorem swap : forall a : nat, a + 0 = 0 + a. " + PROOF, "statement changed"),
        ("Theorem swap : forall a b : nat,  a + b = b + a. " + PROOF, "statement changed"),
        (f"(* {STATEMENT} *) Theorem swap : True. Proof. exact I. Qed.", "statement changed"),
    ],
)
def test_what_the_screen_refuses(proof, reason):
    """Without the checker."""
    score = theorems.verify(proof, COQ)
    assert (score.value, score.reason) == (0, reason)


@pytest.mark.parametrize(
    ("text", "bare", "syntax"),
    [
        ("a (* b (* c *) d *) e", "a   e", sources.COQ),
        ('a (* " *) " *) e', "a   e", sources.COQ),
        ('a "(*" b "*)" c', 'a "(*" b "*)" c', sources.COQ),
        ("a (* never closed", "a ", sources.COQ),
        ("a *) b", "a *) b", sources.COQ),
        ("a -- b\nc /- d /- e -/ -- f -/ g", "a  \nc   g", sources.LEAN),
        ('a /- " -/ b "-- c" -- d', 'a   b "-- c"  ', sources.LEAN),
        (r'a "\"/-" b -/', r'a "\"/-" b -/', sources.LEAN),
    ],
)
def test_comments_are_removed(text, bare, syntax):
    assert sources.uncommented(text, syntax).split() == bare.split()


@pytest.mark.parametrize(
    "text",
    [
        *(
            ":= by sorry",
            ":= by native_decide",
            "axiom a : False",
            "set_option debug.skipKernelTC true",
        ),
        *(
            'macro "trivial" : tactic => `(tactic| sorry)',
            "run_cmd pure ()",
            "#eval 1",
            "open Lean",
        ),
        *("variable [h : Fact False]", "@[implemented_by f] def g := 1", "attribute [tactic x] f"),
        *("unsafe def f := 1", "#exit", "theorem swap (a : Nat) : a + 0 = a := rfl", "import Evil"),
    ],
)
def test_lean_text_that_is_refused(text):
    score = lean.verify(f"theorem h : True := trivial\n{text}", LEAN)
    assert score.value == 0
    assert score.reason.startswith(("forbidden", "statement changed"))


def test_lean_checks_the_reference_s_type():
    wanted = "theorem swap (a b : Nat) : a + b = b + a"
    source = lean.compose("import Mathlib", wanted, "swap", f"{wanted} := Nat.add_comm a b")
    lines = source.splitlines()
    assert lines[0] == "import Mathlib"
    assert lines[1] == "theorem _root_.jaxpost_reference (a b : Nat) : a + b = b + a := by sorry"
    assert lines[-2].endswith(": type_of% @_root_.jaxpost_reference := @swap")
    assert lines[-1] == "#print axioms _root_.jaxpost_checked"


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("'jaxpost_checked' does not depend on any axioms", set()),
        ("'x' depends on axioms: [propext, Quot.sound]", {"propext", "Quot.sound"}),
        ("'x' depends on axioms: [propext,\n sorryAx]", {"propext", "sorryAx"}),
        ("anything else", {"anything else"}),
    ],
)
def test_lean_axioms_are_read(printed, found):
    assert lean.axioms(printed) == found


@needs_lean
def test_lean_proofs():
    proofs = ("exact Nat.add_comm a b", "omega", "rfl", "theorem swap : True := trivial")
    assert [theorems.verify(proof, LEAN).value for proof in proofs] == [1, 1, 0, 0]


def test_rows_that_are_wrong_say_so():
    with pytest.raises(ValueError, match="language is agda"):
        theorems.verify("", {"language": "agda", "statement": "x"})
    with pytest.raises(KeyError, match="formal_statement"):
        sources.statement({"goal": ""})
