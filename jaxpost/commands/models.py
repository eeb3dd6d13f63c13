"""Any model that a user may name: a Hugging Face folder or hub id, or a run and its checkpoints."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import checkpoint, hub, train_step
from jaxpost import config as configs
from jaxpost.commands import recipes
from jaxpost.data import chat, prompts, sources, tokenizers
from jaxpost.models import make_model
from jaxpost.models.model import Model
from jaxpost.recipes import setup
from jaxpost.typing import Params

SCORING = ("reward_model", "process_reward_model")  # recipes of models that write no text


class Opened(NamedTuple):
    """A model ready for use, adapters folded in; `config` is that of its run, or None."""

    model: Model
    params: Params
    tokenizer: tokenizers.Tokenizer
    config: Any

    @property
    def chat(self) -> chat.ChatOptions:
        """How its run wrote chats."""
        if self.config is None:
            return chat.ChatOptions()
        if reads_rows(self.config):
            return self.config.chat
        return chat.ChatOptions(template_kwargs=self.config.data.template_kwargs)


def reads_rows(config: Any) -> bool:
    """Whether a configuration is one of fine-tuning: rows whose every target is known."""
    return config is not None and isinstance(config.data, sources.DataConfig)


def has_prompts(config: Any) -> bool:
    """Whether a configuration is one of RL: prompts that a reward judges the completions of."""
    return config is not None and isinstance(config.data, prompts.PromptConfig)


def open_model(
    path: str, *, step: str = "latest", dtype: str | None = None, adapter: str | None = None
) -> Opened:
    """Loads a model with its tokenizer.

    Args:
      path: a Hugging Face folder or hub id, a run's folder, or a checkpoint.
      step: of a run: `latest`, `best` or a number.
      dtype: parameter and activation type; None keeps what is stored.
      adapter: a PEFT adapter to put on it.

    Raises:
      FileNotFoundError, ValueError: as `hub.load_model` and `hub.load_adapter`.
      CheckpointError: no such checkpoint, or a damaged one.
    """
    if is_run(path):
        opened = open_run(path, step, dtype)
    else:
        if step != "latest":
            raise ValueError(f"{path} is not a run's folder, so it has no step {step}")
        model, params = hub.load_model(path, dtype=dtype)
        tokenizer = tokenizers.load_tokenizer(path)
        setup.check_vocabulary(tokenizer, model.config.vocab_size, path)
        opened = Opened(model, params, tokenizer, None)
    if adapter is None:
        return opened
    model, params = hub.merge(*hub.load_adapter(adapter, opened.model, opened.params))
    return opened._replace(model=model, params=params)


def check_tokenizer(path: str) -> None:
    """A model folder's tokenizer, if there is one, must fit the model.

    Raises:
      ValueError: as `setup.check_vocabulary`.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return
    try:
        tokenizer = tokenizers.load_tokenizer(folder)
    except FileNotFoundError:
        return
    setup.check_vocabulary(tokenizer, hub.load_config(folder).vocab_size, path)


def is_run(path: str) -> bool:
    """Whether a path is a run's folder, its folder of checkpoints, or one of these."""
    folder = Path(path).expanduser()
    return (
        (folder / "checkpoints").is_dir()
        or (folder / checkpoint.MARKER).is_file()
        or bool(checkpoint.list_steps(folder))
    )


def open_run(path: str, step: str, dtype: str | None) -> Opened:
    """The policy of a run at a checkpoint: the moving average, where the run keeps one."""
    place = checkpoint.find_checkpoint(Path(path).expanduser(), step_of(step))
    print(f"reading {place}", file=sys.stderr)
    written = checkpoint.read_config(place)
    if written["recipe"] in SCORING:
        kind = written["recipe"].replace("_", " ")
        raise ValueError(f"{path} is the run of a {kind}, which scores texts and writes none")
    config = configs.from_dict(recipes.named(written["recipe"]).Config, written)
    policy = setup.load_policy(config.model, jax.random.key(config.seed))
    params = restored(place, written, policy.params, policy.trainable)
    model = policy.model
    if model.config.lora is not None:
        model, params = hub.merge(model, params)
    return cast(Opened(model, params, policy.tokenizer, config), dtype)


def restored(place: Path, written: Mapping[str, Any], params: Params, trainable: Any) -> Params:
    """The parameters of a checkpoint, in the types of those that its run started from."""
    chosen = train_step.select(params, trainable)
    saved = load_saved(place, written, chosen)
    saved = jax.tree.map(lambda new, old: new.astype(old.dtype), saved, chosen)
    return train_step.merge(saved, params, trainable)


def load_saved(place: Path, written: Mapping[str, Any], chosen: Params) -> Params:
    """What a checkpoint has in place of `chosen`; where there is a critic, it lies beside it."""
    field = "params" if written.get("ema_decay") is None else "ema"
    wanted = abstract(chosen, field)
    if "critic" not in written:
        return checkpoint.load_params(place, wanted, field=field)
    return checkpoint.load_params(place, {"policy": wanted}, field=field)["policy"]


def step_of(step: str) -> str | int:
    """`latest`, `best`, or a number."""
    if step in ("latest", "best"):
        return step
    if not step.isdigit():
        raise ValueError(f"--step {step}: write latest, best, or the number of a step")
    return int(step)


def abstract(params: Params, field: str) -> Any:
    """Shapes and types of what was saved; a moving average is kept in float32."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32 if field == "ema" else leaf.dtype, sharding=leaf.sharding
        ),
        params,
    )


def cast(opened: Opened, dtype: str | None) -> Opened:
    """The model with all parameters, and its activations, in another type."""
    if dtype is None:
        return opened
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), opened.params)
    config = dataclasses.replace(opened.model.config, compute_dtype=dtype)
    return opened._replace(params=params, model=make_model(config, opened.model.card))
