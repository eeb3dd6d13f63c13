"""What a folder is for, where its architecture does not say: the field `jaxpost` of `config.json`.

transformers keeps fields that it does not know, and does nothing with them.
"""

from collections.abc import Mapping
from typing import Any

from jaxpost.hub import config_json, load, source
from jaxpost.models.model import Model

FIELD = "jaxpost"
VERIFIER = "generative_verifier"


def with_note(model: Model, **note: str) -> Model:
    """A model whose folder will say this."""
    hf = {**model.card.hf_config, FIELD: note}
    return model._replace(card=model.card._replace(hf_config=hf))


def note_of(model: Model) -> Mapping[str, Any]:
    """What the folder of a model said."""
    return model.card.hf_config.get(FIELD) or {}


def kind_of(path_or_hub_id: source.Path) -> str:
    """What judges completions in a folder: reward_model, process_reward_model, generative_verifier.

    Only `config.json` is read, and of a hub repository fetched.

    Raises:
      FileNotFoundError: as `load_model`.
      ValueError: a folder that is none of these.
    """
    folder = source.folder_of(path_or_hub_id, ["config.json"])
    hf = load.config_of(folder)
    kind = config_json.without_lm_head(hf)
    if kind is not None:
        return kind
    if (hf.get(FIELD) or {}).get("kind") != VERIFIER:
        raise ValueError(
            f"{folder}/config.json: architectures = {hf.get('architectures')} judges nothing: it "
            "is no reward model, no process reward model (a token classifier), and not written by "
            "the recipe generative_verifier"
        )
    return VERIFIER
