"""Seconds of one SFT update: ours against TRL's SFTTrainer, float32, 4 × 512 tokens, all trained.

    python tests/bench/sft_step.py small --trl-python ENV/bin/python --tokenizer models/smollm2
    python tests/bench/sft_step.py smollm2 ...

ENV is a venv of its own: pip install torch==2.13.0 transformers trl. Each side runs in its own
process, one after the other and with nothing else running; compilation and two warm-up updates do
not count; the median of the others does. TRL runs on one thread and on two, the faster one counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODELS = {
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
}
SHARED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 4, 512


def ours(config: dict, updates: int) -> dict:
    """Our train step, as the sft recipe makes it."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpost
    from jaxpost import hub, writer

    model, params = hub.init_model(config, jax.random.key(0), remat="dots")
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH + 1), 0, config["vocab_size"])
    everywhere = jnp.ones((ROWS, LENGTH))
    batch = jaxpost.TokenBatch(
        tokens[:, :-1],
        tokens[:, 1:],
        everywhere > 0,
        jaxpost.loss_weights.token_mean(everywhere),
        jnp.ones((ROWS, LENGTH), jnp.int32),
        jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
    )

    def objective(params, batch):
        logps = jaxpost.token_logps(model, params, batch)
        return jnp.sum(batch.loss_weights * jaxpost.losses.nll(logps)), {}

    optimizer = optax.adamw(1e-5)
    step = jax.jit(jaxpost.make_train_step(objective, optimizer), donate_argnums=0)
    state = jaxpost.init_state(params, optimizer)
    times = []
    for _ in range(updates):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - start)
    flops = writer.train_flops_per_token(model.config, LENGTH) * ROWS * LENGTH
    seconds = statistics.median(times[2:])
    peak = writer.measure_matmul_peak("float32", seconds=2.0)
    return {"seconds": seconds, "mfu": flops / seconds / peak, "peak_gflops": peak / 1e9}


def trl(config: dict, updates: int, threads: int, tokenizer: str) -> dict:
    """TRL's trainer on random weights of the same architecture and rows of the same length."""
    import datasets
    import torch
    import transformers
    import trl as library

    torch.set_num_threads(threads)
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config["vocab_size"], (ROWS * updates, LENGTH), generator=generator)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.start)

    settings = library.SFTConfig(
        output_dir="/tmp/trl_bench",
        per_device_train_batch_size=ROWS,
        max_steps=updates,
        max_length=LENGTH,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = library.SFTTrainer(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": statistics.median(times[2:]), "threads": threads}


def run(python: str, *arguments: str) -> dict:
    """One side in its own process; its last line is its result."""
    done = subprocess.run(
        [python, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--side", choices=("ours", "trl"), help="only this side, in this process")
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", help="python of a venv with TRL")
    parser.add_argument("--tokenizer", default="models/smollm2", help="any tokenizer folder")
    options = parser.parse_args()
    config = SHARED | MODELS[options.model]
    if options.side == "ours":
        print(json.dumps(ours(config, options.updates)))
        return
    if options.side == "trl":
        print(json.dumps(trl(config, options.updates, options.threads, options.tokenizer)))
        return
    common = (options.model, "--updates", str(options.updates))
    result = {"ours": run(sys.executable, *common, "--side", "ours")}
    if options.trl_python:
        tokenizer = str(Path(options.tokenizer).absolute())
        sides = [
            run(
                options.trl_python, *common, "--side", "trl", "--threads", str(threads),
                "--tokenizer", tokenizer,
            )
            for threads in (1, 2)
        ]  # fmt: skip
        result["trl"] = min(sides, key=lambda side: side["seconds"])
        result["ratio"] = result["trl"]["seconds"] / result["ours"]["seconds"]
    for side in ("ours", "trl"):
        if side in result:
            result[side]["tokens_per_second"] = ROWS * LENGTH / result[side]["seconds"]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
