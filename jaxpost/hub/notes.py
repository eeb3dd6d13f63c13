"""What a folder is for, where its architecture does not say: the field `jaxpost` of `config.json`.

transformers keeps fields that it does not know, and does nothing with them.
"""

from jaxpost.models.model import Model

FIELD = "jaxpost"


def with_note(model: Model, **note: str) -> Model:
    """A model whose folder will say this."""
    hf = {**model.card.hf_config, FIELD: note}
    return model._replace(card=model.card._replace(hf_config=hf))
