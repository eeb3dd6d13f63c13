"""Checks by hand that what jaxpost writes is loaded by transformers and peft as it is.

Two environments take turns, since torch is in only one of them:

    python tests/golden/check_exports.py write FOLDER          # where jaxpost is installed
    golden-venv/bin/python tests/golden/check_exports.py check FOLDER    # torch, transformers, peft

`write` saves every family's tiny golden model (plain, in shards, in bfloat16) and three adapters,
each with the logits that jaxpost gives. `check` loads them with no missing and no unexpected key
and compares the logits: below 1e-4 in float32. The last line says how many passed.
"""

import json
import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
TOKENS = np.random.default_rng(11).integers(0, 60, (2, 20))
LIMIT = 1e-4


def write(folder: pathlib.Path) -> None:
    import jax

    from jaxpost import hub, models
    from jaxpost.models import LoRA

    def save(name, model, params, **options):
        hub.save_model(folder / name, model, params, **options)
        np.save(folder / f"{name}.npy", models.logits(model, params, TOKENS))

    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((GOLDEN / "families").glob("*.json")):
        for spelling, hf in json.loads(path.read_text()).items():
            model, params = hub.init_model(hf | {"initializer_range": 0.2}, jax.random.key(0))
            params = jax.tree.map(lambda x: x + 0.1 * (x == 1), params)
            save(f"{path.stem}-{spelling}", model, params)
    save("sharded", model, params, max_shard_bytes=9000)
    hub.save_model(folder / "half", model, params, dtype="bfloat16")
    half = hub.load_model(folder / "half", dtype="float32")
    np.save(folder / "half.npy", models.logits(*half, TOKENS))
    base = hub.load_model(GOLDEN / "adapters" / "base")
    options = {"ranks": (("up_proj", 2),), "alphas": (("q_proj", 7.0),)}
    loras = {
        "adapter-plain": LoRA(rank=4, alpha=9, targets=("q_proj", "v_proj")),
        "adapter-all": LoRA(rank=4, alpha=8, rank_stabilized=True, **options),
        "adapter-mlp": LoRA(rank=1, alpha=2.5, targets=(".*(gate|up)_proj",)),
    }
    for name, lora in loras.items():
        model, params = hub.add_lora(*base, lora, jax.random.key(1))
        params = jax.tree.map_with_path(
            lambda path, x: x + 0.1 if path[-1].key == "lora_b" else x, params
        )
        hub.save_adapter(folder / name, model, params)
        np.save(folder / f"{name}.npy", models.logits(model, params, TOKENS))


def check(folder: pathlib.Path) -> None:
    import torch
    import transformers

    passed, cases = 0, sorted(path for path in folder.iterdir() if path.is_dir())
    for path in cases:
        model, problems = (adapter if path.name.startswith("adapter") else whole)(path)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits.float().numpy()
        gap = float(np.abs(logits - np.load(folder / f"{path.name}.npy")).max())
        good = gap < LIMIT and not problems
        passed += good
        print("ok  " if good else "FAIL", path.name, f"{gap:.1e}", problems or "")
    print(f"{passed} of {len(cases)} passed (transformers {transformers.__version__})")


def whole(path: pathlib.Path):
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval(), {name: value for name, value in info.items() if value}


def adapter(path: pathlib.Path):
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "adapters" / "base", attn_implementation="eager"
    )
    model = peft.get_peft_model(base, peft.PeftConfig.from_pretrained(path))
    result = model.load_adapter(path, "default")
    missing = [name for name in result.missing_keys if "lora_" in name]
    return model.eval(), [*missing, *result.unexpected_keys]


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
