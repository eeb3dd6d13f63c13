"""Models from and to the outside: Hugging Face folders, PEFT adapters, GGUF in."""

from jaxpost.hub.adapters import load_adapter, save_adapter
from jaxpost.hub.convert import convert, refuse_source
from jaxpost.hub.load import init_model, load_config, load_model
from jaxpost.hub.notes import kind_of, note_of
from jaxpost.hub.process_reward_models import (
    load_process_reward_model,
    save_process_reward_model,
    step_separator,
)
from jaxpost.hub.reward_models import load_reward_model, save_reward_model
from jaxpost.hub.save import save_model
from jaxpost.models.lora import add_lora, merge, trainable

__all__ = [
    "add_lora",
    "convert",
    "init_model",
    "kind_of",
    "load_adapter",
    "load_config",
    "load_model",
    "load_process_reward_model",
    "load_reward_model",
    "merge",
    "note_of",
    "refuse_source",
    "save_adapter",
    "save_model",
    "save_process_reward_model",
    "save_reward_model",
    "step_separator",
    "trainable",
]
