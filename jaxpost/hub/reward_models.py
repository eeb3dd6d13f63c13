"""Reward models in and out: what transformers calls AutoModelForSequenceClassification, one label.

A reward is hidden · `score.weight` at the last token of a sequence, which is its EOS or end of
turn. The transformer has no language-model head: `model.config.tied_embeddings` is true whatever
`config.json` says, so that `params` hold none, and logits of it mean nothing.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpost import companions, models
from jaxpost.hub import config_json, load, pad_token, reading, save, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models import transformer
from jaxpost.models.model import Model, ModelCard, Remat
from jaxpost.typing import Params

log = logging.getLogger("jaxpost")

SCORE = "score.weight"
DEFAULT_LABELS = 2  # of transformers, where a config does not say


def load_reward_model(
    path_or_hub_id: source.Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    remat: Remat = "none",
) -> tuple[Model, Params, Params]:
    """(model, params, head) from a reward model's folder; the head, {"weight": [D]}, is float32.

    Raises:
      FileNotFoundError, ValueError: as `load_model`; and a causal language model, a classifier of
        more labels, or a folder without `score.weight`.
    """
    folder = source.folder_of(path_or_hub_id)
    hf = load.config_of(folder)
    check_config(folder, hf)
    model, params, head = classifier(folder, hf, read_head, dtype, compute_dtype, remat)
    if hf.get("pad_token_id") in pad_token.ending(model.card):
        log.warning(
            "%s: its padding token ends texts too, so transformers reads its rewards at the token "
            "before; here they are read at the last token",
            folder,
        )
    return model, params, head


def classifier(
    folder: pathlib.Path,
    hf: Mapping[str, Any],
    head_of: Callable[[pathlib.Path, dict[str, tensors.Stored], int], Params],
    dtype: DTypeLike | None,
    compute_dtype: DTypeLike | None,
    remat: Remat,
) -> tuple[Model, Params, Params]:
    """(model, params, head) of a folder whose head `head_of` takes out of the tensors stored."""
    try:
        config = models.config_from_hf(config_json.of_transformer(hf))
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from error
    config = dataclasses.replace(config, tied_embeddings=True)
    stored = tensors.stored_tensors(folder)
    head = head_of(folder, stored, config.width)
    if stored.pop(reading.HEAD, None):
        log.warning("%s: %s is not read: a reward model has no use for it", folder, reading.HEAD)
    target = None if dtype is None else load.parameter_dtype(dtype)
    params = reading.params_of(folder, stored, hf, config, target)
    compute = load.parameter_dtype(compute_dtype or params["embedding"].dtype)
    config = dataclasses.replace(config, compute_dtype=str(compute), remat=remat)
    return models.make_model(config, ModelCard(hf, companions.read(folder))), params, head


def check_config(folder: pathlib.Path, hf: Mapping[str, Any]) -> None:
    """Refuses what is not a sequence classifier of one label."""
    where = f"{folder}/config.json"
    named = hf.get("architectures")
    if named and not config_json.is_reward_model(hf):
        hint = ""
        if list(named) == [config_json.ARCHITECTURES.get(hf.get("model_type", ""))]:
            hint = (
                ": a causal language model without a reward head; load it with load_model, and "
                "train a head of zeros (models.heads.reward_head)"
            )
        raise ValueError(f"{where}: architectures = {list(named)} is no reward model{hint}")
    count = labels_of(hf)
    if count != 1:
        raise ValueError(
            f"{where}: a classifier of {count} labels (id2label = {hf.get('id2label')}); a reward "
            "model has 1"
        )


def labels_of(hf: Mapping[str, Any]) -> int:
    """How many labels a classifier's config has."""
    labels = hf.get("id2label")
    return hf.get("num_labels", DEFAULT_LABELS) if labels is None else len(labels)


def read_head(folder: pathlib.Path, stored: dict[str, tensors.Stored], width: int) -> Params:
    """The head, taken out of `stored`."""
    if SCORE not in stored:
        raise ValueError(f"{folder}: lacks tensor {SCORE}, the head of a reward model")
    tensor = stored.pop(SCORE)
    reading.check_shape(SCORE, reading.Found(tensor.file, tensor.shape), (1, width))
    weight = tensors.finite(tensor.read(), SCORE, tensor.file)
    return {"weight": jnp.asarray(weight[0].astype(np.float32))}


def save_reward_model(
    path: source.Path,
    model: Model,
    params: Params,
    head: Params,
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes a folder that AutoModelForSequenceClassification loads as it is, with one label.

    LoRA adapters are folded in; a language-model head is left out. The folder appears complete or
    not at all, with the companions of `model.card`. See `pad_token` for the one thing that may
    change in them.

    Args:
      dtype: type to store in; None keeps the parameters' and the head's own.

    Raises:
      ValueError: a head that is not {"weight": [D]}; a model without a config to write.
      FileExistsError: the path holds something other than a model folder.
    """
    weight = weight_of(path, head, model.config.width)
    if low_rank.has_lora(params):
        model, params = low_rank.merge(model, params)
    padding = pad_token.chosen(model.card, model.config.vocab_size)
    causal, params = without_lm_head(model, params)
    hf = config_json.of_reward_model(
        save.written_config(causal, params, dtype), model.card.hf_config, padding.token_id
    )
    stored = load.parameter_dtype(dtype or weight.dtype)
    score = tensors.Writable(
        SCORE, (1, model.config.width), stored, lambda: np.asarray(weight)[None].astype(stored)
    )
    parts = [*save.writable(causal, params, dtype), score]
    save.write_folder(path, hf, padding.files, parts, save.MAX_SHARD_BYTES)


def weight_of(path: source.Path, head: Params, width: int) -> Any:
    shapes = {name: tuple(leaf.shape) for name, leaf in head.items()}
    if shapes != {"weight": (width,)}:
        raise ValueError(
            f"{os.fspath(path)}: the head has leaves {shapes}, but a reward model stores "
            f"{{'weight': ({width},)}} and nothing else; make one by models.heads.reward_head"
        )
    return head["weight"]


def without_lm_head(model: Model, params: Params) -> tuple[Model, Params]:
    """The transformer alone, as a causal language model whose head is its embedding."""
    hf = model.card.hf_config
    if "model_type" in hf:  # else there is nothing to write, which written_config says
        hf = {**config_json.of_transformer(hf), "tie_word_embeddings": True}
    config = dataclasses.replace(model.config, tied_embeddings=True)
    rest = {name: value for name, value in params.items() if name != "lm_head"}
    return transformer.make_model(config, model.card._replace(hf_config=hf)), rest
