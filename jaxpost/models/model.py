"""What a model is: a frozen description of its architecture, and a record of pure functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxpost.typing import Array, Params

Remat = Literal["none", "dots", "full"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: angular frequencies `theta**(-2i/head_dim)`, then a rescaling.

    `kind` names the rescaling as Hugging Face configs do: `default` (none), `linear` (all
    frequencies divided by `factor`), `llama3` (low frequencies divided, high ones kept, a smooth
    blend between; Llama 3.1), `yarn` (arXiv 2309.00071: a ramp between `beta_fast` and `beta_slow`
    rotations, and queries and keys scaled by `attention_factor`).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation (arXiv 2106.09685): `y = x W + scale · (x A) B`, A [in, r], B [r, out].

    `targets` are regular expressions matched against the whole projection name (`q_proj`,
    `gate_proj`, …). `scale = alpha / rank`, or `alpha / sqrt(rank)` when `rank_stabilized`
    (arXiv 2312.03732). `ranks` and `alphas` override the two for projections by name.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    rank_stabilized: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The architecture of a decoder-only transformer, and how to compute it.

    One description covers every supported family; the family files in this folder translate a
    Hugging Face `config.json` into it. `local_layers[i]` says whether layer i sees only the last
    `window` positions (and, with `rope_local`, uses that rope). `query_scale` multiplies q·k.
    `norm_offset` is added to every norm weight (1.0 for Gemma, whose weights are stored minus one).
    `compute_dtype` is the type of activations; parameters keep whatever type they arrive in.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    query_scale: float
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    rope: Rope = Rope()
    rope_local: Rope | None = None
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    max_positions: int = 8192
    init_std: float = 0.02
    lora: LoRA | None = None
    compute_dtype: str = "float32"
    remat: Remat = "none"


class ModelCard(NamedTuple):
    """What is needed to write a model back to a Hugging Face folder as it came.

    Attributes:
      hf_config: the content of `config.json`.
      files: small companions by file name (tokenizer, chat template, generation config).
    """

    hf_config: Mapping[str, Any]
    files: Mapping[str, bytes]


class Cache(NamedTuple):
    """Keys and values of the tokens read so far, [layers, B, kv_heads, length, head_dim] each.

    Slot s of a row holds the token at position s, so a row needs no padding on its left, and what
    lies beyond a row's length is never read. In int8 both have scales, [..., length, 1].
    """

    keys: Array
    values: Array
    key_scales: Array | None = None
    value_scales: Array | None = None


class Model(NamedTuple):
    """A transformer as pure functions over its parameters.

    Attributes:
      config: the architecture.
      card: what is needed to write it back to a Hugging Face folder.
      init: `key -> params`, freshly initialised float32 parameters.
      apply: `(params, tokens [B,T], segment_ids [B,T] or None, positions [B,T] or None,
        noise [B,T,D] or None) -> hidden [B,T,D]`, after the final norm. Attention is causal and
        stays inside a segment; `noise` is added to the token embeddings (NEFTune).
      head: `params -> [V, D]`, the matrix that turns hidden states into logits.
      unembed: `(params, hidden [...,D]) -> logits [...,V]` in float32, final soft-cap included.
      init_cache: `(batch, length, dtype=None) -> Cache` of zeros.
      decode: `(params, tokens [B,S], cache, starts [B]) -> (hidden [B,S,D], cache)`: reads S more
        tokens of each row at positions `starts[b] ... starts[b]+S-1`, writing them to the cache.
    """

    config: TransformerConfig
    card: ModelCard
    init: Callable[..., Params]
    apply: Callable[..., Array]
    head: Callable[[Params], Array]
    unembed: Callable[[Params, Array], Array]
    init_cache: Callable[..., Cache]
    decode: Callable[..., tuple[Array, Cache]]
