"""Reading a Hugging Face `config.json` strictly: what the family files share.

Every field is either understood, or known to leave the logits alone, or refused by name. Both
spellings are read: `rope_theta` + `rope_scaling` + `torch_dtype` (transformers 4), and
`rope_parameters` + `dtype` (transformers 5).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.models.model import Activation, Rope, TransformerConfig

# Fields that the logits do not depend on: token ids, bookkeeping, defaults of generation.
INERT_NAMES = """
architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path
_commit_hash use_cache cache_implementation return_dict return_dict_in_generate
output_hidden_states output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss
attn_implementation _attn_implementation _attn_implementation_autoset
vocab_file tokenizer_class prefix finetuning_task task_specific_params problem_type id2label
label2id num_labels max_sequence_length is_llama_config
pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id
max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p
repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
num_beam_groups diversity_penalty
transformers.js_config unsloth_fixed unsloth_version
jaxpost
"""
INERT = frozenset(INERT_NAMES.split())

# Fields that would change the computation, with the only value under which they do not.
NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_dropout": 0,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

LAYER_TYPES = ("full_attention", "sliding_attention")

ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


class Fields:
    """The fields of a `config.json` (or of one dictionary in it), each read at most by type.

    `close` refuses whatever was not read. `where` goes in front of field names in errors.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str, where: str = ""):
        self.values, self.model_type, self.where = values, model_type, where
        self.read: set[str] = set()
        self.defaults: dict[str, Any] = {}

    def error(self, name: str, supported: str) -> ValueError:
        absent = f"(absent, so {self.defaults.get(name)!r})"
        value = repr(self.values[name]) if name in self.values else absent
        return ValueError(
            f"config.json: {self.where}{name} = {value} is not supported for model_type "
            f"{self.model_type!r}; supported: {supported}"
        )

    def get(self, name: str, default: Any) -> Any:
        """The value as it stands, `default` where the field is absent (null is a value)."""
        self.read.add(name)
        self.defaults[name] = default
        return self.values.get(name, default)

    def required(self, name: str) -> int:
        if name not in self.values:
            raise ValueError(
                f"config.json: field {self.where}{name} is missing "
                f"(model_type {self.model_type!r} needs it)"
            )
        return self.integer(name, 0)

    def integer(self, name: str, default: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "an integer of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "a number above 0")
        return float(value)

    def integer_or_none(self, name: str, default: int | None) -> int | None:
        value = self.get(name, default)
        return None if value is None else self.integer(name, value)

    def number_or_none(self, name: str, default: float | None) -> float | None:
        value = self.get(name, default)
        return None if value is None else self.number(name, value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def only(self, name: str, value: Any) -> None:
        """Accepts the field when it is absent, null or equal to `value`."""
        given = self.get(name, None)
        if given is not None and given != value:
            raise self.error(name, f"{value!r}, or leave it out")

    def close(self) -> None:
        """Refuses every field that was neither read nor known to be without effect."""
        for name, value in NEUTRAL.items():
            if name not in self.read:
                self.only(name, value)
        for name in self.values:
            if name not in self.read and name not in INERT:
                raise self.refusal(name)

    def refusal(self, name: str) -> ValueError:
        return ValueError(
            f"config.json: field {self.where}{name} = {self.values[name]!r} is not supported for "
            f"model_type {self.model_type!r}: its effect on the model is unknown here. Remove it "
            f"only if you know that it has none."
        )


def open_fields(hf: Mapping[str, Any], architecture: str) -> Fields:
    """The fields of a config whose `architectures`, if given, name `architecture` alone."""
    fields = Fields(hf, str(hf.get("model_type")))
    architectures = fields.get("architectures", None)
    if architectures and list(architectures) != [architecture]:
        raise fields.error("architectures", f"[{architecture!r}]")
    return fields


def shape(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    """The sizes that every family has, as keyword arguments of `TransformerConfig`.

    `kv_heads` and `head_dim` are the family's defaults for absent fields (None: as many as heads;
    width / heads), `max_positions` and `tied` likewise.
    """
    width, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    kv_heads = fields.integer_or_none("num_key_value_heads", kv_heads) or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = fields.integer_or_none("head_dim", head_dim)
    if head_dim is None:
        if width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
        head_dim = width // heads
    if head_dim % 2:
        raise ValueError(
            f"config.json: head_dim = {head_dim} (or hidden_size / num_attention_heads) is not "
            f"supported: rotary embeddings need an even number"
        )
    return {
        "vocab_size": fields.required("vocab_size"),
        "width": width,
        "layers": fields.required("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": fields.required("intermediate_size"),
        "query_scale": head_dim**-0.5,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "init_std": fields.number("initializer_range", 0.02),
        "max_positions": fields.integer("max_position_embeddings", max_positions),
        "tied_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def activation(fields: Fields, name: str, default: str) -> Activation:
    """The activation of the gated MLP."""
    value = fields.get(name, default)
    if value not in ACTIVATIONS:
        raise fields.error(name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[value]


def local_layers(fields: Fields, layers: int, default: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers slide: from `layer_types` if given, else `default`."""
    types = fields.get("layer_types", None)
    if types is None:
        return tuple(default)
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise fields.error("layer_types", f"a list of num_hidden_layers = {layers} names")
    if not set(types) <= set(LAYER_TYPES):
        raise fields.error("layer_types", " and ".join(LAYER_TYPES))
    return tuple(kind == "sliding_attention" for kind in types)


def sliding(fields: Fields, window: int | None, local: tuple[bool, ...]) -> dict[str, Any]:
    """`window` and `local_layers` of `TransformerConfig`; nothing where no layer slides."""
    if not any(local):
        return {}
    if window is None:
        raise fields.error("sliding_window", "an integer, since layers of this config slide")
    return {"window": window, "local_layers": local}


def rope(fields: Fields, *, theta: float, max_positions: int) -> Rope:
    """The one rope of a model, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    old, new = fields.get("rope_scaling", None), fields.get("rope_parameters", None)
    if old and new and dict(old) != dict(new):
        raise fields.error("rope_scaling", "the same as rope_parameters, or only one of the two")
    name = "rope_parameters" if new else "rope_scaling"
    given = fields.get("rope_theta", None)
    if new and given is not None and new.get("rope_theta", given) != given:
        raise fields.error("rope_theta", "the same as rope_parameters.rope_theta")
    theta = theta if given is None else fields.number("rope_theta", theta)
    return rope_of(fields, name, new or old or {}, theta=theta, max_positions=max_positions)


def rope_of(
    fields: Fields, name: str, values: Mapping[str, Any], *, theta: float, max_positions: int
) -> Rope:
    """One rope from its dictionary `values`, which stands in the config under `name`."""
    rope = Fields(values, fields.model_type, f"{name}.")
    kind = rope.get("rope_type", None) or rope.get("type", None) or "default"
    if kind not in ROPE_FIELDS:
        raise rope.error("rope_type" if "rope_type" in values else "type", ", ".join(ROPE_FIELDS))
    rope.only("type", kind)
    rope.only("partial_rotary_factor", 1)
    for field in values:
        if field not in (*ROPE_FIELDS[kind], *rope.read, "rope_theta"):
            raise rope.refusal(field)
    theta = rope.number("rope_theta", theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=rope_number(rope, "factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=rope_number(rope, "factor"),
            low_freq_factor=rope_number(rope, "low_freq_factor"),
            high_freq_factor=rope_number(rope, "high_freq_factor"),
            original_max_positions=original_positions(rope, max_positions),
        )
    if kind == "yarn":
        return yarn(rope, theta, max_positions)
    return Rope(theta=theta)


def yarn(rope: Fields, theta: float, max_positions: int) -> Rope:
    """A YaRN rope; `attention_factor` is worked out here where only `mscale`s are given."""
    original = original_positions(rope, max_positions)
    factor = rope.number_or_none("factor", None) or max_positions / original
    mscale = rope.number_or_none("mscale", None)
    mscale_all = rope.number_or_none("mscale_all_dim", None)
    attention_factor = rope.number_or_none("attention_factor", None)
    if attention_factor is None and mscale and mscale_all and factor > 1:
        log = 0.1 * math.log(factor)
        attention_factor = (mscale * log + 1) / (mscale_all * log + 1)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number_or_none("beta_fast", None) or 32.0,
        beta_slow=rope.number_or_none("beta_slow", None) or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=attention_factor,
    )


def original_positions(rope: Fields, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    return rope.integer_or_none(name, None) or max_positions


def rope_number(rope: Fields, name: str) -> float:
    """A number without a default: a rope type cannot be computed without it."""
    if rope.values.get(name) is None:
        raise ValueError(f"config.json: field {rope.where}{name} is missing; give a number above 0")
    return rope.number(name, 0.0)


def names(config: TransformerConfig, norms: Mapping[str, str]) -> dict[str, str]:
    """For each of our parameters, the Hugging Face tensor name, with `{}` for the layer number.

    `norms` maps our names of a layer's norms to theirs. A leaf called `kernel` is the transpose of
    the Hugging Face weight; every other leaf is stored as it is.
    """
    layer = "model.layers.{}."
    result = {"embedding": "model.embed_tokens.weight", "final_norm/scale": "model.norm.weight"}
    if not config.tied_embeddings:
        result["lm_head"] = "lm_head.weight"
    for ours, theirs in norms.items():
        result[f"layers/{ours}/scale"] = f"{layer}{theirs}.weight"
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            result[f"layers/{name}/scale"] = f"{layer}self_attn.{name}.weight"
    projections = {
        "self_attn": {
            "q_proj": config.qkv_bias,
            "k_proj": config.qkv_bias,
            "v_proj": config.qkv_bias,
            "o_proj": config.out_bias,
        },
        "mlp": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias),
    }
    for part, members in projections.items():
        for name, bias in members.items():
            result[f"layers/{name}/kernel"] = f"{layer}{part}.{name}.weight"
            if bias:
                result[f"layers/{name}/bias"] = f"{layer}{part}.{name}.bias"
    return result


PRE_NORMS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
SANDWICH_NORMS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
