"""Process reward models in and out: what transformers calls AutoModelForTokenClassification.

A step is right with the probability σ(z), z = hidden · weight + bias at its last token. There are
two labels, of which 1 is that of right steps, as TRL trains them: z is the difference of their
logits, and is written as ∓ z/2. A folder of one label has z itself.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpost.hub import config_json, load, notes, reading, reward_models, save, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models.model import Model, Remat
from jaxpost.typing import Array, Params

BIAS = "score.bias"
SEPARATOR = "\n"  # TRL's between steps, where a folder says nothing


def load_process_reward_model(
    path_or_hub_id: source.Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    remat: Remat = "none",
) -> tuple[Model, Params, Params]:
    """(model, params, head), the head {"weight": [D], "bias": []} in float32, for `heads.read`.

    Raises:
      FileNotFoundError, ValueError: as `load_model`; and a folder of another kind, of more than two
        labels, or without `score.weight`.
    """
    folder = source.folder_of(path_or_hub_id)
    hf = load.config_of(folder)
    count = reward_models.labels_of(hf)
    if not config_json.is_process_reward_model(hf) or count > 2:
        raise ValueError(
            f"{folder}/config.json: architectures = {hf.get('architectures')} with {count} labels "
            "is no process reward model, which is a token classifier of two labels (or one)"
        )
    return reward_models.classifier(folder, hf, read_head, dtype, compute_dtype, remat)


def step_separator(path_or_hub_id: source.Path) -> str:
    """What ends each step, as the folder says; else `SEPARATOR`. Raises as the loader."""
    return notes.note_of(path_or_hub_id).get("step_separator", SEPARATOR)


def read_head(folder: pathlib.Path, stored: dict[str, tensors.Stored], width: int) -> Params:
    """The head, taken out of `stored`; a head may come without a bias."""
    if reward_models.SCORE not in stored:
        raise ValueError(f"{folder}: lacks tensor {reward_models.SCORE}, the head of its steps")
    count = stored[reward_models.SCORE].shape[0]
    weight = rows_of(stored, reward_models.SCORE, (count, width))
    bias = rows_of(stored, BIAS, (count,)) if BIAS in stored else np.zeros(count, np.float32)
    return {"weight": of_right(weight), "bias": of_right(bias)}


def rows_of(stored: dict[str, tensors.Stored], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the head, one row a label, taken out of `stored`."""
    tensor = stored.pop(name)
    reading.check_shape(name, reading.Found(tensor.file, tensor.shape), shape)
    return tensors.finite(tensor.read(), name, tensor.file).astype(np.float32)


def of_right(rows: np.ndarray) -> Array:
    """What says that a step is right: the second label's row less the first's, or the only one."""
    return jnp.asarray(rows[1] - rows[0] if len(rows) == 2 else rows[0])


def save_process_reward_model(
    path: source.Path,
    model: Model,
    params: Params,
    head: Params,
    *,
    step_separator: str = SEPARATOR,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes a folder that AutoModelForTokenClassification loads as it is, with two labels.

    LoRA adapters are folded in; a language-model head is left out. The folder appears complete or
    not at all. Its `config.json` says what ends a step.

    Raises:
      ValueError: a head of other leaves; a family without a token classifier in transformers.
      FileExistsError: the path holds something other than a model folder.
    """
    check_family(model.card.hf_config)
    shapes = {name: tuple(leaf.shape) for name, leaf in head.items()}
    if shapes != {"weight": (model.config.width,), "bias": ()}:
        raise ValueError(
            f"{os.fspath(path)}: the head has leaves {shapes}, but a process reward model has a "
            f"weight [{model.config.width}] and a bias []; make one by models.heads.zero_head"
        )
    if low_rank.has_lora(params):
        model, params = low_rank.merge(model, params)
    noted = notes.with_note(model, kind="process_reward_model", step_separator=step_separator)
    causal, params = reward_models.without_lm_head(noted, params)
    written = save.written_config(causal, params, dtype)
    hf = config_json.of_process_reward_model(written, model.card.hf_config)
    names = {"weight": reward_models.SCORE, "bias": BIAS}
    scores = [of_two(name, head[leaf], dtype) for leaf, name in names.items()]
    parts = [*save.writable(causal, params, dtype), *scores]
    save.write_folder(path, hf, model.card.files, parts, save.MAX_SHARD_BYTES)


def of_two(name: str, leaf: Array, dtype: DTypeLike | None) -> tensors.Writable:
    """A leaf of the head as a tensor of two labels."""
    stored = load.parameter_dtype(dtype or leaf.dtype)
    half = np.asarray(leaf, np.float32) / 2
    both = np.stack([-half, half]).astype(stored)
    return tensors.Writable(name, both.shape, stored, lambda: both)


def check_family(hf: Mapping[str, Any]) -> None:
    """Raises ValueError for a family of which transformers has no token classifier."""
    if hf.get("model_type") not in config_json.TOKEN_CLASSIFIERS:
        raise ValueError(
            f"model_type {hf.get('model_type')!r} has no token classifier in transformers, which a "
            "process reward model is written as; start from a model of "
            f"{', '.join(config_json.TOKEN_CLASSIFIERS)}"
        )
