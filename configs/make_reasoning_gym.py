"""Writes training and held-out rows of a reasoning-gym task (pip install reasoning-gym).

    python configs/make_reasoning_gym.py chain_sum data --train 8000 --held-out 500 \\
        --set min_terms=2 max_terms=3 min_digits=2 max_digits=3

Rows are conversational prompt/completion pairs; no held-out question is in the training rows.
"""

import argparse
import json
from pathlib import Path

import reasoning_gym


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", help="name of a reasoning-gym task")
    parser.add_argument("folder", type=Path, help="where train.jsonl and held_out.jsonl go")
    parser.add_argument("--train", type=int, default=8000, help="rows (%(default)s)")
    parser.add_argument("--held-out", type=int, default=500, help="rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="task settings")
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, _, value in (s.partition("=") for s in options.set)}
    size = options.train + options.held_out
    items = reasoning_gym.create_dataset(options.task, size=size, seed=options.seed, **settings)
    rows = [(item["question"], str(item["answer"])) for item in items]
    held_out = dict(rows[: options.held_out])
    train = [row for row in rows[options.held_out :] if row[0] not in held_out]
    write(options.folder / "train.jsonl", train)
    write(options.folder / "held_out.jsonl", list(held_out.items()))
    print(f"{len(train)} training and {len(held_out)} held-out rows in {options.folder}")


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for question, answer in rows:
            row = {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
