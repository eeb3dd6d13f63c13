"""The learning curves of this folder, and their plot; no tests here.

    jaxpost quickstart
    for method in grpo ppo pmd; do for seed in 0 1 2; do
        jaxpost train configs/${method}_sums.yaml seed=$seed run=runs/curves/${method}_$seed
    done; done
    pip install matplotlib
    python tests/curves/make.py runs/curves

A line of `<method>_<seed>.jsonl` is an evaluation: the rollouts done, the greedy accuracy on the
quickstart's held-out sums, and the mean reward of the rollout before it.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
METHODS = {"grpo": ("GRPO", "tab:blue"), "ppo": ("PPO", "tab:orange"), "pmd": ("PMD", "tab:green")}
SEEDS = (0, 1, 2)


def collect(runs: Path) -> None:
    """Writes the curves of runs into this folder."""
    for name in (f"{method}_{seed}" for method in METHODS for seed in SEEDS):
        lines = (runs / name / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "eval/accuracy" in record]
        kept = [
            {key: record[key] for key in ("step", "eval/accuracy", "reward") if key in record}
            for record in records
        ]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))


def curve(name: str) -> tuple[list[int], list[float]]:
    records = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    return [r["step"] for r in records], [100 * r["eval/accuracy"] for r in records]


def plot() -> None:
    """One picture of all curves: a line a seed, a colour a method."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, (label, colour) in METHODS.items():
        for seed in SEEDS:
            steps, accuracy = curve(f"{method}_{seed}")
            axes.plot(steps, accuracy, color=colour, label=label if seed == SEEDS[0] else None)
    axes.set(xlabel="rollouts of 256 completions", ylabel="held-out questions right, %")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "sums.svg", metadata={"Date": None})


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
    plot()
