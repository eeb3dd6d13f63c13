"""What tests of recipes share: a model of a few thousand parameters, and what its runs wrote."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from jaxpost import config as configs
from jaxpost import writer

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}


def records(run) -> list[dict]:
    """What was logged, but for what depends on the clock."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in writer.WALL_CLOCK}
        for line in lines
    ]


def logged(run, name) -> list[float]:
    return [record[name] for record in records(run) if name in record]


def run_apart(recipe: str, config: Any, harms: list[str]) -> None:
    """`jaxpost train` in processes of its own, the last of which ends; see `recipe_run`."""
    written = {"recipe": recipe, **configs.to_dict(config)}
    path = Path(config.run).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(json.loads(json.dumps(written))))
    script = Path(__file__).parent / "recipe_run.py"
    done = subprocess.run(
        [sys.executable, script, path, *harms], capture_output=True, text=True, check=False
    )
    assert "child none 0" in done.stdout, done.stdout + done.stderr
