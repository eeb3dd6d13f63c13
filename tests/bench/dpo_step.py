"""One DPO update, ours against TRL's DPOTrainer: pairs a second and peak memory, float32.

    python tests/bench/dpo_step.py small --trl-python TRL/bin/python --tokenizer models/smollm2
    python tests/bench/dpo_step.py models/smollm2 --trl-python TRL/bin/python

TRL is a venv of its own: pip install torch==2.13.0 transformers trl. `small` is the 18M Llama of
sft_step.py, freshly initialised, and needs `--tokenizer`; else the folder of a model.

An update: 4 pairs whose prompt has 256 tokens and whose completions have 128 to 256, the longest
256, so that a pair's sides have up to 512; AdamW. Both sides begin with the same weights and
pairs, and report the log-probabilities of the first update's completions, which must be the same.
Our side is `jaxpost train`, which computes the reference's numbers once, before the updates
(`reference_seconds_a_pair`, not part of an update). TRL computes them in every update by a second
model (what it does by itself), and once before the updates (`--trl-reference once`, its
`precompute_ref_log_probs`); the table has both.

Each side runs in its own process, one after the other and with nothing else running. Of ours counts
`step_time` as the last update logs it, the mean of those before without the first, which compiles;
of TRL's the median of all updates but the first two. TRL runs on one thread and on two, the faster
one counts. Peak memory is that of the whole process. Our side runs with huge pages, as the command
line sets them for itself (`GLIBC_TUNABLES`), TRL as it comes; `--huge-pages all` sets them for
both, `none` for none.
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

PAIRS, PROMPT_TOKENS, SHORTEST, LONGEST = 4, 256, 128, 256
MAX_LENGTH = PROMPT_TOKENS + LONGEST
WARM_UP = 2
LEARNING_RATE, BETA = 1e-6, 0.1
CONFIG = """recipe: dpo
run: {folder}/run
model: {{path: {folder}/model, tokenizer: {folder}/tokenizer}}
data: {{train: {folder}/pairs.jsonl, shuffle: false, max_length: {length}}}
beta: {beta}
batch_size: {pairs}
optimizer: {{learning_rate: {rate}, schedule: constant}}
checkpoint: {{every: 0}}
steps: {steps}
"""


def write_job(model: str, tokenizer: str, folder: Path, steps: int) -> None:
    """Weights, pairs and our configuration."""
    if model == "small":
        import jax
        import sft_step

        from jaxpost import hub

        made = hub.init_model(sft_step.SHARED | sft_step.MODELS["small"], jax.random.key(0))
        hub.save_model(folder / "model", *made)
    else:
        (folder / "model").symlink_to(Path(model).absolute())
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer) / name, folder / "tokenizer")
    lines = map(json.dumps, pairs_of(folder / "tokenizer", steps * PAIRS))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    values = {"length": MAX_LENGTH, "beta": BETA, "pairs": PAIRS, "rate": LEARNING_RATE}
    (folder / "job.yaml").write_text(CONFIG.format(folder=folder, steps=steps, **values))


def pairs_of(folder: Path, count: int) -> list[dict[str, str]]:
    """Texts of random words that are one token; a completion's end is its last token."""
    import numpy as np

    from jaxpost.data import tokenizers

    tokenizer = tokenizers.load_tokenizer(folder)
    texts = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    words = [
        text for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()
    ]
    draw = np.random.default_rng(0)
    lengths = draw.integers(SHORTEST, LONGEST, (count, 2))
    lengths[::PAIRS, 0] = LONGEST - 1

    def text(length: int) -> str:
        found = "".join(draw.choice(words, length).tolist())
        assert len(tokenizer.encode(found)) == length
        return found

    return [
        {"prompt": text(PROMPT_TOKENS), "chosen": text(first), "rejected": text(second)}
        for first, second in lengths.tolist()
    ]


def ours(folder: Path) -> dict:
    """What `jaxpost train` logs."""
    from jaxpost import __main__ as cli

    code = cli.main(["train", str(folder / "job.yaml")])
    assert code == cli.DONE, f"jaxpost train ended with {code}"
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    logs = [log for log in map(json.loads, lines) if log["step"]]
    return summary(logs[-1]["step_time"], logs)


def trl(folder: Path, threads: int, reference: str) -> dict:
    """TRL's DPOTrainer."""
    import datasets
    import torch
    import transformers
    import trl as library

    torch.set_num_threads(threads)
    rows = list(map(json.loads, (folder / "pairs.jsonl").read_text().splitlines()))
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    settings = library.DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=len(rows) // PAIRS,
        max_length=MAX_LENGTH,
        beta=BETA,
        precompute_ref_log_probs=reference == "once",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = library.DPOTrainer(
        str(folder / "model"),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = summary(statistics.median(seconds[WARM_UP:]), logs)
    return {**found, "all_seconds": seconds, "threads": threads, "reference": reference}


def summary(seconds: float, logs: list[dict]) -> dict:
    first = {name: logs[0][name] for name in ("loss", "grad_norm", "logps/chosen")}
    return {
        "pairs_per_second": PAIRS / seconds,
        "seconds": seconds,
        "first": first,
        "peak_bytes": processes.peak_bytes(),
    }


def compare(options: argparse.Namespace, folder: Path) -> dict:
    tokenizer = options.tokenizer or (None if options.model == "small" else options.model)
    if tokenizer is None:
        raise SystemExit("small has no tokenizer of its own: give --tokenizer FOLDER")
    write_job(options.model, tokenizer, folder, options.updates)
    job = ("small", "--folder", str(folder), "--side")

    def run(python: str, *arguments: str, huge_pages: bool) -> dict:
        return processes.run(__file__, python, *job, *arguments, huge_pages=huge_pages)

    mine = run(sys.executable, "ours", huge_pages=options.huge_pages != "none")
    result = {"ours": mine}
    for reference in options.trl_reference.split(",") if options.trl_python else ():
        sides = [
            run(
                options.trl_python,
                *("trl", "--threads", threads, "--trl-reference", reference),
                huge_pages=options.huge_pages == "all",
            )
            for threads in options.threads.split(",")
        ]
        theirs = min(sides, key=lambda side: side["seconds"])
        theirs["our_speed_ratio"] = theirs["seconds"] / mine["seconds"]
        theirs["our_memory_ratio"] = mine["peak_bytes"] / theirs["peak_bytes"]
        result[f"trl, reference {reference}"] = theirs
        both = mine["first"]["logps/chosen"], theirs["first"]["logps/chosen"]
        if not math.isclose(*both, rel_tol=1e-3):
            raise SystemExit(f"the two sides do not do the same: {json.dumps(result, indent=2)}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="`small`, or the folder of a model")
    parser.add_argument("--updates", type=int, default=7, help="updates; two do not count")
    parser.add_argument("--trl-python", help="python of a venv with TRL")
    parser.add_argument("--tokenizer", help="a tokenizer's folder; by default the model's")
    parser.add_argument("--threads", default="1,2", help="TRL's, the fastest of which counts")
    parser.add_argument(
        "--trl-reference", default="always,once", help="when TRL computes the reference's numbers"
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
        print(json.dumps(trl(options.folder, int(options.threads), options.trl_reference)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
