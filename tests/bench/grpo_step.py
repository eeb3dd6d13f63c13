"""A whole GRPO step, ours against TRL's GRPOTrainer: seconds, tokens/s and peak memory, float32.

    python tests/bench/grpo_step.py small --trl-python TRL/bin/python --tokenizer models/smollm2
    python tests/bench/grpo_step.py models/smollm2 --trl-python TRL/bin/python

TRL is a venv of its own: pip install torch==2.13.0 transformers trl. `small` is the 18M Llama of
sft_step.py, freshly initialised, and needs `--tokenizer`; else the folder of a model.

A step: 8 completions of 64 tokens for each of 4 prompts of 64 tokens, at temperature 1; a cheap
reward; one update with AdamW, without KL. Nothing stops early: our side has a tokenizer without an
end, TRL's a least length, and both say that all lengths were 64. Our side is `jaxpost train` with
the times that it logs; TRL's step is what passes between the ends of two steps. Both begin with the
same weights and prompts, and report the entropy of the first step, which must be nearly the same
(the samples are not).

Each side runs in its own process, one after the other and with nothing else running. The first two
steps do not count, in which our side compiles (no program is kept between runs); the median of the
others does. TRL runs on one thread and on two, and in its update takes all completions at once, and
8 at a time (the gradient is the same); the fastest of these counts. Peak memory is that of the
whole process. Our side runs with huge pages, as the command line sets them for itself
(`GLIBC_TUNABLES`), TRL as it comes; `--huge-pages all` sets them for both, `none` for none.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import processes

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64
WARM_UP = 2
LEARNING_RATE = 1e-6
CONFIG = """recipe: grpo
run: {folder}/run
model: {{path: {folder}/model, tokenizer: {folder}/endless}}
data: {{train: {folder}/prompts.jsonl, shuffle: false}}
reward: {{function: '{here}:score'}}
rollout: {{prompts: {prompts}, completions: {group}, max_new_tokens: {new}}}
optimizer: {{learning_rate: {rate}, schedule: constant}}
checkpoint: {{every: 0}}
steps: {steps}
"""


def score(completion, example):
    """The share of e among a completion's letters."""
    return completion.count("e") / max(len(completion), 1)


def write_job(model: str, tokenizer: str, folder: Path, steps: int) -> None:
    """Weights, prompts, our configuration, and a tokenizer that knows no end."""
    if model == "small":
        import jax
        import sft_step

        from jaxpost import hub

        made = hub.init_model(sft_step.SHARED | sft_step.MODELS["small"], jax.random.key(0))
        hub.save_model(folder / "model", *made)
    else:
        (folder / "model").symlink_to(Path(model).absolute())
    (folder / "endless").mkdir()
    shutil.copy(Path(tokenizer) / "tokenizer.json", folder / "endless")
    rows = prompts_of(folder / "endless", steps * PROMPTS)
    lines = (json.dumps({"prompt": text}) for text in rows)
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    values = {"prompts": PROMPTS, "group": GROUP, "new": NEW_TOKENS, "rate": LEARNING_RATE}
    text = CONFIG.format(folder=folder, here=Path(__file__).absolute(), steps=steps, **values)
    (folder / "job.yaml").write_text(text)


def prompts_of(folder: Path, count: int) -> list[str]:
    """Texts of 64 tokens each: random words that are one token."""
    import numpy as np

    from jaxpost.data import tokenizers

    tokenizer = tokenizers.load_tokenizer(folder)
    assert not tokenizer.eos_ids
    texts = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    words = [
        text for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()
    ]
    drawn = np.random.default_rng(0).choice(words, (count, PROMPT_TOKENS))
    rows = ["".join(row) for row in drawn.tolist()]
    assert all(len(tokenizer.encode(row)) == PROMPT_TOKENS for row in rows)
    return rows


def ours(folder: Path) -> dict:
    """What `jaxpost train` logs."""
    from jaxpost import __main__ as cli

    code = cli.main(["train", str(folder / "job.yaml")])
    assert code == cli.DONE, f"jaxpost train ended with {code}"
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    logs = [log for log in map(json.loads, lines) if log["step"]]
    assert all(log["completions/min_length"] == NEW_TOKENS for log in logs)
    parts = ("sample", "reward", "logps", "update", "other")
    times = {part: [log[f"time/{part}"] for log in logs] for part in parts}
    return summary([sum(each) for each in zip(*times.values(), strict=True)], times, logs)


def trl(folder: Path, tokenizer: str, threads: int, rows_at_once: int) -> dict:
    """TRL's GRPOTrainer; its update takes so many completions at a time, and generation all."""
    import datasets
    import torch
    import transformers
    import trl as library

    torch.set_num_threads(threads)
    rows = list(map(json.loads, (folder / "prompts.jsonl").read_text().splitlines()))
    ends: list[float] = []
    sampling: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    class Timed(library.GRPOTrainer):
        def _generate_single_turn(self, *arguments, **named):
            start = time.perf_counter()
            found = super()._generate_single_turn(*arguments, **named)
            sampling.append(time.perf_counter() - start)
            return found

    settings = library.GRPOConfig(
        output_dir=str(folder / f"trl{threads}"),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=PROMPTS * GROUP // rows_at_once,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        max_steps=len(rows) // PROMPTS,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Timed(
        str(folder / "model"),
        lambda completions, **_: [score(text, {}) for text in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
        callbacks=[Clock()],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["completions/min_length"] == NEW_TOKENS for log in logs)
    assert logs[0]["num_tokens"] == PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    others = [whole - part for whole, part in zip(seconds, sampling, strict=True)]
    result = summary(seconds, {"sample": sampling, "update and other": others}, logs)
    return {**result, "threads": threads, "rows_at_once": rows_at_once}


def summary(seconds: list[float], parts: dict[str, list[float]], logs: list[dict]) -> dict:
    first = {name: logs[0][name] for name in ("loss", "grad_norm", "entropy", "reward")}
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "parts": {name: statistics.median(values[WARM_UP:]) for name, values in parts.items()},
        "first_step_seconds": seconds[0],
        "all_seconds": seconds,
        "first": first,
        "peak_bytes": processes.peak_bytes(),
    }


def run(python: str, folder: Path, *arguments: str, huge_pages: bool) -> dict:
    """One side in its own process."""
    side = ("small", "--folder", str(folder), *arguments)
    result = processes.run(__file__, python, *side, huge_pages=huge_pages)
    tokens = PROMPTS * GROUP * NEW_TOKENS
    return {"sampled_tokens_per_second": tokens / result["seconds"], **result}


def compare(options: argparse.Namespace, folder: Path) -> dict:
    tokenizer = options.tokenizer or (None if options.model == "small" else options.model)
    if tokenizer is None:
        raise SystemExit("small has no tokenizer of its own: give --tokenizer FOLDER")
    write_job(options.model, tokenizer, folder, options.updates)
    mine_huge, huge = options.huge_pages != "none", options.huge_pages == "all"
    result = {"ours": run(sys.executable, folder, "--side", "ours", huge_pages=mine_huge)}
    if options.trl_python:
        more = ("--side", "trl", "--tokenizer", str(Path(tokenizer).absolute()))
        sides = [
            run(
                options.trl_python,
                folder,
                *(*more, "--threads", threads, "--trl-rows", rows),
                huge_pages=huge,
            )
            for threads in options.threads.split(",")
            for rows in options.trl_rows.split(",")
        ]
        theirs = result["trl"] = min(sides, key=lambda side: side["seconds"])
        theirs["our_speed_ratio"] = theirs["seconds"] / result["ours"]["seconds"]
        theirs["our_memory_ratio"] = result["ours"]["peak_bytes"] / theirs["peak_bytes"]
        entropies = [side["first"]["entropy"] for side in result.values()]
        if not math.isclose(*entropies, rel_tol=0.1):
            raise SystemExit(f"the two sides do not do the same: {json.dumps(result, indent=2)}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="`small`, or the folder of a model")
    parser.add_argument("--updates", type=int, default=7, help="steps, of which two do not count")
    parser.add_argument("--trl-python", help="python of a venv with TRL")
    parser.add_argument("--tokenizer", help="a tokenizer's folder; by default the model's")
    parser.add_argument("--threads", default="1,2", help="TRL's, the fastest of which counts")
    parser.add_argument(
        "--trl-rows", default="32,8", help="completions that TRL's update takes at once, likewise"
    )
    parser.add_argument("--huge-pages", choices=("ours", "all", "none"), default="ours")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.updates <= WARM_UP:
        parser.error(f"--updates must be above {WARM_UP}, which do not count")
    if options.side == "ours":
        print(json.dumps(ours(options.folder)))
    elif options.side == "trl":
        print(
            json.dumps(
                trl(options.folder, options.tokenizer, int(options.threads), int(options.trl_rows))
            )
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
