"""One SFT update, ours against others: seconds, tokens/s and peak memory, float32, 4 × 512 tokens.

    python tests/bench/sft_step.py small --trl-python TRL/bin/python --tokenizer models/smollm2
    python tests/bench/sft_step.py smollm2 --trl-python TRL/bin/python --tokenizer models/smollm2
    python tests/bench/sft_step.py small --tunix-python TUNIX/bin/python

TRL and TUNIX are venvs of their own: pip install torch==2.13.0 transformers trl, and
pip install google-tunix. Every side starts from the same weights and sees the same rows, and
reports its first loss, which must be the same. Each runs in its own process, one after the other
and with nothing else running; compilation and two warm-up updates do not count; the median of the
others does. TRL runs on one thread and on two, the faster one counts. Peak memory is that of the
whole process, so it includes the libraries themselves; `import_bytes` says how much these take.
Our side runs with huge pages, as the command line sets them for itself (`GLIBC_TUNABLES`), the
others as they come; `--huge-pages all` sets them for all, `none` for none.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import processes

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
    "rms_norm_eps": 1e-6,  # with rope_theta, what Tunix's Llama has built in
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 4, 512
WARM_UP = 2
LEARNING_RATE = 1e-5


def write_job(folder: Path, config: dict, updates: int) -> None:
    """The weights as a Hugging Face folder, and the rows of every update."""
    import jax

    from jaxpost import hub

    hub.save_model(folder, *hub.init_model(config, jax.random.key(0)))
    draw = np.random.default_rng(0)
    np.save(folder / "rows.npy", draw.integers(0, config["vocab_size"], (updates, ROWS, LENGTH)))


def ours(folder: Path) -> dict:
    """Our train step, with what the sft recipe asks of it."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpost
    from jaxpost import hub, writer

    imported = processes.peak_bytes()
    model, params = hub.load_model(folder, remat="dots")
    everywhere = jnp.ones((ROWS, LENGTH))
    trained = everywhere.at[:, -1].set(0.0)  # the last token has no target

    def batch_of(tokens):
        return jaxpost.TokenBatch(
            jnp.asarray(tokens),
            jnp.roll(jnp.asarray(tokens), -1, axis=1),
            trained > 0,
            jaxpost.loss_weights.token_mean(trained),
            jnp.ones((ROWS, LENGTH), jnp.int32),
            jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
        )

    def weighted(scores, weights):
        return weights * jaxpost.losses.nll(scores.logps)

    def objective(params, batch):
        loss, _ = jaxpost.token_loss(model, params, batch, weighted, batch.loss_weights)
        return loss, {}

    optimizer = optax.adamw(LEARNING_RATE)
    step = jax.jit(jaxpost.make_train_step(objective, optimizer), donate_argnums=0)
    state = jaxpost.init_state(params, optimizer)
    del params
    times, losses = [], []
    for tokens in np.load(folder / "rows.npy").astype(np.int32):
        start = time.perf_counter()
        state, metrics = step(state, batch_of(tokens))
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM_UP:])
    memory = processes.peak_bytes()
    flops = writer.train_flops_per_token(model.config, LENGTH) * ROWS * LENGTH
    peak = writer.measure_matmul_peak("float32", seconds=2.0)
    return {
        "seconds": seconds,
        "first_loss": losses[0],
        "peak_bytes": memory,
        "import_bytes": imported,
        "mfu": flops / seconds / peak,
        "useful_gflop": flops / 1e9,
        "matmul_peak_gflops": peak / 1e9,
    }


def trl(folder: Path, tokenizer: str, threads: int) -> dict:
    """TRL's SFTTrainer."""
    import datasets
    import torch
    import transformers
    import trl as library

    imported = processes.peak_bytes()
    torch.set_num_threads(threads)
    rows = np.load(folder / "rows.npy")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.start)

    settings = library.SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS,
        max_steps=len(rows),
        max_length=LENGTH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = library.SFTTrainer(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows.reshape(-1, LENGTH).tolist()}),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "seconds": statistics.median(times[WARM_UP:]),
        "first_loss": trainer.state.log_history[0]["loss"],
        "peak_bytes": processes.peak_bytes(),
        "import_bytes": imported,
        "threads": threads,
    }


def tunix(folder: Path) -> dict:
    """Tunix's PeftTrainer on the whole model (it trains all parameters where none is LoRA's)."""
    import jax
    import jax.numpy as jnp
    import optax
    from tunix.models.llama3 import model as llama
    from tunix.models.llama3 import params as weights
    from tunix.sft import hooks, peft_trainer, utils

    imported = processes.peak_bytes()
    config = json.loads((folder / "config.json").read_text())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = weights.create_model_from_safe_tensors(
        str(folder),
        llama.ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            num_kv_heads=config["num_key_value_heads"],
            rope_theta=int(SHARED["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            weight_tying=True,
        ),
        mesh,
        jnp.float32,
    )
    rows = np.load(folder / "rows.npy").astype(np.int32)
    times: list[float] = []
    losses: list[float] = []

    class Clock(hooks.TrainingHooks):
        """An update ends when its loss can be read, one update late; so do all but the first."""

        def on_train_start(self, train_ctx):
            self.last = time.perf_counter()

        def on_train_step_end(self, train_ctx, train_step, train_loss):
            losses.append(float(train_loss))
            now = time.perf_counter()
            times.append(now - self.last)
            self.last = now

        def nothing(self, *_):
            pass

        on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = nothing

    def inputs(tokens):
        mask = tokens >= 0
        return {
            "input_tokens": tokens,
            "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    trainer = peft_trainer.PeftTrainer(
        model,
        optax.adamw(LEARNING_RATE),
        peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=len(rows)),
    )
    trainer.with_gen_model_input_fn(inputs)
    trainer.with_training_hooks(Clock())
    with mesh:
        trainer.train(list(rows))
    return {
        "seconds": statistics.median(times[WARM_UP:]),
        "first_loss": losses[0],
        "peak_bytes": processes.peak_bytes(),
        "import_bytes": imported,
    }


def run(python: str, folder: Path, *arguments: str, huge_pages: bool) -> dict:
    """One side in its own process."""
    side = ("small", "--folder", str(folder), *arguments)
    result = processes.run(__file__, python, *side, huge_pages=huge_pages)
    return {"tokens_per_second": ROWS * LENGTH / result["seconds"], **result}


def compare(options: argparse.Namespace, folder: Path) -> dict:
    write_job(folder, SHARED | MODELS[options.model], options.updates)
    mine_huge, huge = options.huge_pages != "none", options.huge_pages == "all"
    result = {"ours": run(sys.executable, folder, "--side", "ours", huge_pages=mine_huge)}
    if options.trl_python:
        tokenizer = str(Path(options.tokenizer).absolute())
        more = ("--side", "trl", "--tokenizer", tokenizer, "--threads")
        sides = [
            run(options.trl_python, folder, *more, threads, huge_pages=huge)
            for threads in ("1", "2")
        ]
        result["trl"] = min(sides, key=lambda side: side["seconds"])
    if options.tunix_python:
        result["tunix"] = run(options.tunix_python, folder, "--side", "tunix", huge_pages=huge)
    mine = result["ours"]
    for side in set(result) - {"ours"}:
        theirs = result[side]
        theirs["our_speed_ratio"] = theirs["seconds"] / mine["seconds"]
        theirs["our_memory_ratio"] = mine["peak_bytes"] / theirs["peak_bytes"]
        if not math.isclose(theirs["first_loss"], mine["first_loss"], rel_tol=1e-3):
            raise SystemExit(f"the two sides do not do the same: {json.dumps(result, indent=2)}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--trl-python", help="python of a venv with TRL")
    parser.add_argument("--tunix-python", help="python of a venv with Tunix")
    parser.add_argument("--huge-pages", choices=("ours", "all", "none"), default="ours")
    parser.add_argument("--tokenizer", default="models/smollm2", help="any tokenizer folder")
    parser.add_argument("--side", choices=("ours", "trl", "tunix"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "ours":
        print(json.dumps(ours(options.folder)))
    elif options.side == "trl":
        print(json.dumps(trl(options.folder, options.tokenizer, options.threads)))
    elif options.side == "tunix":
        print(json.dumps(tunix(options.folder)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
