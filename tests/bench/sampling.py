"""Sampling, ours against transformers' `generate`, against the floor, and against static batches.

    python tests/bench/sampling.py speed small --transformers-python GOLDEN/bin/python
    python tests/bench/sampling.py speed models/smollm2 --transformers-python GOLDEN/bin/python
    python tests/bench/sampling.py spread small

GOLDEN is a venv of its own: pip install torch==2.13.0 transformers. `small` is the 18M Llama of
sft_step.py, freshly initialised; else the folder of a model. All is float32, with 32 completions
at a time; every side runs in its own process, one after the other, `--rounds` times, with nothing
else running; compilation does not count, the median of all timed calls does.

`speed`: 4 prompts of 64 tokens × 8 completions of 64 tokens, drawn at temperature 1 without
truncation and without a stop token. transformers runs on one thread and on two, the faster counts.
The floor of a step is the larger of its arithmetic (at the rate of a large matrix product) and of
reading the weights once (at the rate of a large sum); that of the prompts is their arithmetic.

`spread`: 128 completions (16 prompts × 8) whose lengths spread from 8 to 256, the same for both
sides. Static: 32 at a time until the longest of them is done, none left out before. Continuous:
`slots=32`. Lengths are drawn with uniform logarithms, and uniformly (where even a perfect
scheduler cannot reach twice the speed: see `bound`, the steps of static over total / slots).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64
SPREAD_PROMPTS, SHORTEST, LONGEST = 16, 8, 256
CALLS = 3


def folder_of(model: str, scratch: str) -> str:
    """The folder of a model; `small` is made."""
    if model != "small":
        return model
    import jax
    import sft_step

    from jaxpost import hub

    made = hub.init_model(sft_step.SHARED | sft_step.MODELS["small"], jax.random.key(0))
    hub.save_model(Path(scratch) / "small", *made)
    return str(Path(scratch) / "small")


def prompts_of(vocabulary: int, count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocabulary, (count, PROMPT_TOKENS)).tolist()


def timed(call) -> list[float]:
    times = []
    for number in range(CALLS):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return times


def ours(folder: str) -> dict:
    import jax

    from jaxpost import hub, rollout

    model, params = hub.load_model(folder)
    prompts = prompts_of(model.config.vocab_size, PROMPTS)
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]

    def call(number):
        result = rollout.sample(
            model, params, repeated, jax.random.key(number), max_new_tokens=NEW_TOKENS
        )
        assert result.lengths.sum() == PROMPTS * GROUP * NEW_TOKENS

    call(0)
    return {"seconds": timed(call), "floor_seconds": floor(model.config, params)}


def floor(config, params) -> float:
    """The least that the prompts and steps can take on this machine."""
    import jax
    import jax.numpy as jnp

    from jaxpost import writer

    peak = writer.measure_matmul_peak("float32", seconds=2.0)
    array = jnp.ones((256, 1 << 20))
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    seconds = min(timed(lambda _: total(array).block_until_ready()))
    bandwidth = array.size * 4 / seconds
    layers = sum(x.size for x in jax.tree.leaves(params["layers"]) if x.ndim == 3)
    head = config.vocab_size * config.width
    attention = 2 * config.layers * config.heads * config.head_dim  # products a token read
    read = PROMPT_TOKENS + NEW_TOKENS / 2
    arithmetic = PROMPTS * GROUP * 2 * (layers + head + attention * read) / peak
    traffic = 4 * (layers + head) / bandwidth
    prefill = PROMPTS * PROMPT_TOKENS * 2 * (layers + attention * PROMPT_TOKENS / 2) / peak
    print(f"{peak / 1e9:.0f} GF/s, {bandwidth / 1e9:.1f} GB/s; a step: {arithmetic * 1e3:.2f} ms "
          f"of arithmetic, {traffic * 1e3:.2f} ms of weights", file=sys.stderr)  # fmt: skip
    return NEW_TOKENS * max(arithmetic, traffic) + prefill


def transformers(folder: str, threads: int) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = torch.tensor(prompts_of(model.config.vocab_size, PROMPTS))

    def call(number):
        torch.manual_seed(number)
        with torch.inference_mode():
            result = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                num_return_sequences=GROUP,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        assert result.shape == (PROMPTS * GROUP, PROMPT_TOKENS + NEW_TOKENS)

    call(0)
    return {"seconds": timed(call), "threads": threads}


def spread(folder: str) -> dict:
    """Continuous against static batches, in turn."""
    import jax

    from jaxpost import hub, rollout
    from jaxpost.rollout import shapes

    model, params = hub.load_model(folder)
    slots = PROMPTS * GROUP
    prompts = [
        prompt
        for prompt in prompts_of(model.config.vocab_size, SPREAD_PROMPTS)
        for _ in range(GROUP)
    ]
    capacity = rollout.Capacity(slots, SPREAD_PROMPTS, PROMPT_TOKENS, LONGEST)
    draw = np.random.default_rng(0)
    logarithmic = np.exp(draw.uniform(np.log(SHORTEST), np.log(LONGEST), len(prompts)))
    lengths = {
        "logarithmic": np.round(logarithmic).astype(int),
        "uniform": draw.integers(SHORTEST, LONGEST + 1, len(prompts)),
    }

    def call(rows, limits, slots):
        result = rollout.sample(
            model, params, [prompts[row] for row in rows], jax.random.key(0), sample_ids=rows,
            limits=limits[rows], max_new_tokens=LONGEST, slots=slots, capacity=capacity,
        )  # fmt: skip
        assert (result.lengths == limits[rows]).all()
        return result.tokens

    def continuous(limits):
        return call(range(len(prompts)), limits, slots)

    def static(limits):
        narrower, shapes.NARROWER = shapes.NARROWER, sys.maxsize
        try:
            batches = [
                call(range(first, first + slots), limits, None)
                for first in range(0, len(prompts), slots)
            ]
        finally:
            shapes.NARROWER = narrower
        return np.concatenate(batches)

    shortest = np.full(len(prompts), SHORTEST)
    same = (continuous(shortest) == static(shortest)).mean()  # compiles both
    result: dict[str, Any] = {"equal_tokens": float(same)}
    for name, limits in lengths.items():
        times = {"static": [], "continuous": []}
        for _ in range(CALLS):
            for side, run in (("static", static), ("continuous", continuous)):
                start = time.perf_counter()
                run(limits)
                times[side].append(time.perf_counter() - start)
        seconds = {side: statistics.median(values) for side, values in times.items()}
        longest = limits.reshape(-1, slots).max(axis=1).sum()
        result[name] = {
            "seconds": seconds,
            "continuous_tokens_per_second": int(limits.sum()) / seconds["continuous"],
            "continuous_over_static": seconds["static"] / seconds["continuous"],
            "bound": float(longest / (limits.sum() / slots)),
        }
    return result


def run(python: str, *arguments: str) -> dict:
    """One side in its own process; its last line is its result."""
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as our command line sets for itself
    environment = os.environ | (tunables if python == sys.executable else {})
    command = [python, __file__, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=HERE
    )
    return json.loads(done.stdout.splitlines()[-1])


def speed(folder: str, python: str | None, rounds: int) -> dict:
    tokens = PROMPTS * GROUP * NEW_TOKENS
    sides: dict[str, list[dict]] = {"ours": []}
    for _ in range(rounds):
        sides["ours"].append(run(sys.executable, "ours", folder))
        for threads in ("1", "2") if python else ():
            name = f"transformers, threads: {threads}"
            sides.setdefault(name, []).append(
                run(str(python), "transformers", folder, "--threads", threads)
            )
    seconds = {
        side: statistics.median(time for round in rounds for time in round["seconds"])
        for side, rounds in sides.items()
    }
    result = {"tokens_per_second": {side: tokens / value for side, value in seconds.items()}}
    mine = seconds.pop("ours")
    result["floor_share"] = min(one["floor_seconds"] for one in sides["ours"]) / mine
    if seconds:
        result["times_transformers"] = min(seconds.values()) / mine
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "spread", "ours", "transformers"))
    parser.add_argument("model", help="`small`, or the folder of a model")
    parser.add_argument("--transformers-python", help="python of a venv with transformers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "ours":
        print(json.dumps(ours(options.model)))
    elif options.what == "transformers":
        print(json.dumps(transformers(options.model, options.threads)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(Path(folder_of(options.model, scratch)).absolute())
            python = options.transformers_python
            made = (
                speed(folder, python and str(Path(python).absolute()), options.rounds)
                if options.what == "speed"
                else spread(folder)
            )
            print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main()
