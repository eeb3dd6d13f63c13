"""Writes training and held-out rows of a reasoning-gym task (pip install reasoning-gym).

    python configs/make_reasoning_gym.py chain_sum data --train 8000 --held-out 500 \\
        --set min_terms=2 max_terms=3 min_digits=2 max_digits=3

Rows are conversational prompt/completion pairs, with what jaxpost.rewards.gym judges by: dataset,
settings, seed and the whole entry as JSON. No held-out question is in the training rows.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reasoning_gym


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", help="name of a reasoning-gym task")
    parser.add_argument("folder", type=Path, help="where train.jsonl and held_out.jsonl go")
    parser.add_argument("--train", type=int, default=8000, help="rows (%(default)s)")
    parser.add_argument("--held-out", type=int, default=500, help="rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shots", type=int, default=0, help="solved tasks shown before each question (%(default)s)"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="task settings")
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, _, value in (s.partition("=") for s in options.set)}
    size = options.shots + options.train + options.held_out
    items = reasoning_gym.create_dataset(options.task, size=size, seed=options.seed, **settings)
    origin = {"dataset": options.task, "settings": json.dumps(settings), "seed": options.seed}
    shown = [row(item, origin) for item in itertools.islice(items, options.shots)]
    turns = [turn for found in shown for turn in (*found["prompt"], *found.get("completion", ()))]
    rows = [(item["question"], row(item, origin, turns)) for item in items][options.shots :]
    held_out = dict(rows[: options.held_out])
    train = [found for question, found in rows[options.held_out :] if question not in held_out]
    write(options.folder / "train.jsonl", train)
    write(options.folder / "held_out.jsonl", list(held_out.values()))
    print(f"{len(train)} training and {len(held_out)} held-out rows in {options.folder}")


def row(
    item: dict[str, Any], origin: dict[str, Any], before: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    """A task without one right answer has no completion: rows for RL only."""
    found: dict[str, Any] = {"prompt": [*before, {"role": "user", "content": item["question"]}]}
    if item["answer"] is not None:
        found["completion"] = [{"role": "assistant", "content": str(item["answer"])}]
    return {**found, **origin, "entry": json.dumps(item, ensure_ascii=False)}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for found in rows:
            file.write(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
