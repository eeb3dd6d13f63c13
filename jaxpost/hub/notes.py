"""What a folder is for, where its architecture does not say: the field `jaxpost` of `config.json`.

transformers keeps fields that it does not know, and does nothing with them.
"""

from collections.abc import Mapping
from typing import Any

from jaxpost.hub import config_json, load, source
from jaxpost.models.model import Model

FIELD = "jaxpost"


def with_note(model: Model, **note: Any) -> Model:
    """A model whose folder will say this: `kind`, and whatever JSON can hold."""
    hf = {**model.card.hf_config, FIELD: note}
    return model._replace(card=model.card._replace(hf_config=hf))


def note_of(path: source.Path) -> Mapping[str, Any]:
    """What a model's folder says of itself; empty where it says nothing.

    Raises:
      FileNotFoundError, ValueError: as `load.load_config`.
    """
    note = load.config_of(source.folder_of(path, ["config.json"])).get(FIELD)
    return note if isinstance(note, Mapping) else {}


def kind_of(path: source.Path) -> str:
    """`reward_model`, `process_reward_model`, or what a language model's note says it is.

    That is `language_model` where there is none. Raises as `note_of`.
    """
    hf = load.config_of(source.folder_of(path, ["config.json"]))
    return config_json.without_lm_head(hf) or note_of(path).get("kind", "language_model")
