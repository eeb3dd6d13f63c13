"""What every recipe shares: the policy it trains, going on after a stop, and the way out."""

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import optax

from jaxpost import checkpoint, hub, models, optimizers, runs, train_step, writer
from jaxpost.data import tokenizers
from jaxpost.models import lora as low_rank
from jaxpost.models.model import LoRA, Model, TransformerConfig
from jaxpost.options import check_ranges, option
from jaxpost.typing import Array, Params

log = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16"]  # the last only to say why not


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters in place of full fine-tuning."""

    rank: int = option(16, "inner dimension of the adapters", least=1)
    alpha: float = option(32.0, "scale: the update is multiplied with alpha / rank", above=0)
    targets: tuple[str, ...] = option(
        LoRA().targets, "regular expressions for the names of the adapted projections"
    )
    rank_stabilized: bool = option(False, "scale with alpha / sqrt(rank) instead (rsLoRA)")

    def __post_init__(self):
        check_ranges(self, "model.lora.")
        low_rank.check(LoRA(**dataclasses.asdict(self)))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Where the policy comes from: a folder or hub id, or a fresh one from a config."""

    path: str | None = option(None, "Hugging Face folder or hub id to start from")
    fresh: dict[str, Any] | None = option(
        None, "start from random weights: the content of a config.json, in place of `path`"
    )
    tokenizer: str | None = option(
        None, "tokenizer folder, hub id, `.model` file, or `bytes`; by default the model's own"
    )
    dtype: DType | None = option("float32", "parameter type; null for the type stored")
    compute_dtype: DType | None = option(None, "activation type; null takes the parameters' type")
    remat: Literal["none", "dots", "full"] = option(
        "dots", "what the backward pass repeats: nothing, all but products and attention, or all"
    )
    lora: LoRAConfig | None = option(None, "train low-rank adapters only")
    adapter: str | None = option(None, "PEFT adapter folder to start the adapters from")

    def __post_init__(self):
        if (self.path is None) == (self.fresh is None):
            raise ValueError("model needs exactly one of model.path and model.fresh")
        if self.fresh is not None and self.tokenizer is None:
            raise ValueError("model.fresh needs model.tokenizer (`bytes` for a byte-level one)")
        if self.adapter is not None and self.lora is not None:
            raise ValueError("model.adapter brings its own rank and targets; leave model.lora out")
        refuse_half("model.dtype", self.dtype)
        refuse_half("model.compute_dtype", self.compute_dtype)


def refuse_half(key: str, dtype: str | None) -> None:
    """Refuses float16: gradients below 6e-8 are 0 in it, and no loss is scaled here."""
    if dtype == "float16":
        raise ValueError(
            f"{key} is float16, in which small gradients vanish; train in bfloat16 or float32"
        )


class Policy(NamedTuple):
    """The model to train: `trainable` is a tree of bools like `params`, or None for all of it."""

    model: Model
    params: Params
    tokenizer: tokenizers.Tokenizer
    trainable: Any


def check_devices() -> None:
    """A recipe trains on one device of one process: refuses more processes, tells of idle devices.

    Raises:
      RuntimeError: there are several processes, each of which would train a model of its own.
    """
    if jax.process_count() > 1:
        raise RuntimeError(
            f"there are {jax.process_count()} processes, and each would train a model of its own: "
            "a recipe does not divide its work among them yet; start it in one process"
        )
    if jax.device_count() > 1:
        log.warning(
            "training on one of %d devices (%s); the others stay idle",
            jax.device_count(),
            jax.devices()[0].device_kind,
        )


def load_policy(config: ModelConfig, key: Array) -> Policy:
    """The policy a configuration describes."""
    init_key, lora_key = jax.random.split(key)
    tokenizer = load_tokenizer(config)
    if config.fresh is not None:
        hf_config = {"vocab_size": tokenizer.vocab_size, **config.fresh}
        model, params = hub.init_model(
            hf_config,
            init_key,
            dtype=config.dtype or "float32",
            compute_dtype=config.compute_dtype,
            remat=config.remat,
            files=tokenizer.files,
        )
    else:
        assert config.path is not None
        model, params = hub.load_model(
            config.path,
            dtype=config.dtype,
            compute_dtype=config.compute_dtype,
            remat=config.remat,
        )
        if config.dtype is None:
            for stored in {str(leaf.dtype) for leaf in jax.tree.leaves(params)}:
                refuse_half(f"model.dtype is null, and what {config.path} stores", stored)
    if config.adapter is not None:
        model, params = hub.load_adapter(config.adapter, model, params)
    elif config.lora is not None:
        lora = LoRA(**dataclasses.asdict(config.lora))
        model, params = hub.add_lora(model, params, lora, lora_key)
    trainable = hub.trainable(params) if model.config.lora is not None else None
    return Policy(model, params, tokenizer, trainable)


def load_tokenizer(config: ModelConfig) -> tokenizers.Tokenizer:
    """The tokenizer, which must fit the model; of the latter only the config is read."""
    if config.tokenizer == "bytes":
        found = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
    else:
        source = config.tokenizer or config.path
        assert source is not None
        found = tokenizers.load_tokenizer(source)
    size = architecture_of(config, found.vocab_size).vocab_size
    check_vocabulary(found, size, config.path or "model.fresh")
    return found


def architecture_of(config: ModelConfig, vocab_size: int = 1) -> TransformerConfig:
    """The architecture, without weights; `vocab_size` is that of a fresh model that names none."""
    if config.fresh is not None:
        return models.config_from_hf({"vocab_size": vocab_size, **config.fresh})
    assert config.path is not None
    return hub.load_config(config.path)


def check_vocabulary(
    tokenizer: tokenizers.HubTokenizer | tokenizers.PieceTokenizer, size: int, model: str
) -> None:
    """Refuses a tokenizer that gives ids which the model has no embedding for.

    Added tokens above the vocabulary that only their own name spells (as Gemma 3's token for
    images, in its text models) are warned of.

    Raises:
      ValueError: with both sizes.
    """
    above = set(range(size, tokenizer.vocab_size))
    if not above:
        return
    ends = {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids}
    sizes = f"the tokenizer has {tokenizer.vocab_size} ids, and {model} a vocabulary of {size}"
    if above - tokenizer.special_ids or above & ends:
        raise ValueError(
            f"{sizes}; use the model's own tokenizer, or a model whose vocab_size (in its "
            f"config.json, or in model.fresh) is at least {tokenizer.vocab_size}"
        )
    spelt = ", ".join(tokenizer.decode([number]) for number in sorted(above)[:3])
    log.warning("%s: a text that holds %s cannot be read", sizes, spelt)


class Source(Protocol):
    """Where data comes from: a position that can be saved."""

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


def resume(
    run: runs.Run,
    saver: checkpoint.Checkpointer,
    state: train_step.TrainState,
    trainable: Any,
    data: Source,
) -> tuple[int, train_step.TrainState, dict[str, int] | None]:
    """(steps done, state, counters) of the newest checkpoint, with the data put where it was."""
    restored = saver.restore(saved_part(state, trainable))
    if restored is None:
        run.resume(0)
        return 0, state, None
    data.set_state(restored.position["data"])
    run.resume(restored.step)
    params = train_step.merge(restored.state.params, state.params, trainable)
    return restored.step, restored.state._replace(params=params), restored.position["counters"]


def save(
    saver: checkpoint.Checkpointer,
    step: int,
    state: train_step.TrainState,
    trainable: Any,
    data: Source,
    meter: writer.Meter,
    resolved: Mapping[str, Any],
    scores: Mapping[str, float],
) -> None:
    """Starts saving what `resume` goes on from. Flush the writer first: metrics go no further."""
    position = {"data": data.get_state(), "counters": meter.state()}
    saver.save(step, saved_part(state, trainable), position, resolved, scores)


MANY_PASSES = 20  # over the data: what is then learnt is mostly this data by heart


def tell_of_passes(one: float, steps: int) -> None:
    """Says how often a run reads its data, if each update reads this part of it.

    How many rows fill an update is known once the first is packed, so this is about right.
    """
    log.info("%d updates make about %.3g passes over the data", steps, one * steps)
    if one * steps > MANY_PASSES:
        log.warning(
            "so many passes mostly teach a model its data by heart; steps=%d makes about 3",
            max(1, round(3 / one)),
        )


def tell_of_schedule(
    changed: Sequence[runs.Change],
    config: optimizers.OptimizerConfig,
    step: int,
    updates: int = 1,
) -> None:
    """Warns where a change of `steps` makes the learning rate jump from one job to the next.

    `updates` are those of a step.
    """
    for change in changed:
        if change.key != "steps" or config.warmup >= min(change.old, change.new) * updates:
            continue
        before, now = (
            float(optimizers.make_schedule(config, steps * updates)(step * updates))
            for steps in (change.old, change.new)
        )
        if before != now:
            log.warning(
                "the learning rate follows %s over all steps, and these went from %d to %d: after "
                "step %d it is %.3g, where it would have been %.3g",
                config.schedule,
                change.old,
                change.new,
                step,
                now,
                before,
            )


def saved_part(state: train_step.TrainState, trainable: Any) -> train_step.TrainState:
    """The state without frozen parameters, which are read again from where they came."""
    return state._replace(params=train_step.select(state.params, trainable))


def averaged(state: train_step.TrainState, trainable: Any) -> Params:
    """The parameters to use: their moving average where one is kept."""
    if state.ema is None:
        return state.params
    chosen = train_step.select(state.params, trainable)
    average = jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, chosen)
    return train_step.merge(average, state.params, trainable)


def make_update(
    config: Any,
    objective: train_step.Objective,
    optimizer: optax.GradientTransformation,
    trainable: Any,
    weigh: Callable[[Any], Any] = lambda batch: batch,
) -> Callable[[train_step.TrainState, Any], tuple[train_step.TrainState, dict[str, Array]]]:
    """The jitted update; the state's buffers are donated.

    `weigh` fixes the loss weights of a batch over the whole update, before it is split.
    """
    step = train_step.make_train_step(
        objective, optimizer, microbatches=config.microbatches, trainable=trainable
    )
    return jax.jit(lambda state, batch: step(state, weigh(batch)), donate_argnums=0)


def check(done: Iterable[tuple[int, writer.Values]]) -> None:
    """Stops the run at a loss or gradient that is not finite."""
    for step, values in done:
        runs.check_finite(step, values)


def make_meter(policy: Policy, counters: dict[str, int] | None) -> writer.Meter:
    """Counts tokens and measures speed against this machine's matrix-product peak."""
    config = policy.model.config
    return writer.Meter(
        flops_per_token=lambda length: writer.train_flops_per_token(
            config, length, adapters_only=policy.trainable is not None
        ),
        peak=writer.measure_matmul_peak(config.compute_dtype),
        counters=counters,
    )


def export(folder: Path, policy: Policy, params: Params, base: str | None) -> None:
    """Writes the trained model for use elsewhere: `model/`, and with LoRA also `adapter/`."""
    for left in folder.glob(".*.*-*"):  # by an export that was killed
        if re.fullmatch(r"\.(model|adapter)\.(new|old)-\d+", left.name):
            shutil.rmtree(left)
    if policy.model.config.lora is not None:
        hub.save_adapter(folder / "adapter", policy.model, params, base_model=base)
        model, params = hub.merge(policy.model, params)
    else:
        model = policy.model
    hub.save_model(folder / "model", model, params)
