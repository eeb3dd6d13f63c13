"""GGUF files in: their metadata as a `config.json`, their tensors dequantised under HF names."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpost.hub import tensors

LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


class Architecture(NamedTuple):
    """What sets one GGUF architecture apart: its HF type, its norms, and how llama.cpp stored it.

    `permuted`: rows of q and k are in llama.cpp's rope order. `norm_offset` was added to norms.
    """

    model_type: str
    norms: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    extra: Mapping[str, Any] = {}


GEMMA_FIELDS = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", LLAMA_NORMS, permuted=True),
    "qwen2": Architecture("qwen2", LLAMA_NORMS, extra={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", LLAMA_NORMS | QK_NORMS, extra={"use_sliding_window": False}),
    "gemma2": Architecture("gemma2", GEMMA_NORMS, norm_offset=1.0, extra=GEMMA_FIELDS),
    "gemma3": Architecture(
        "gemma3_text", GEMMA_NORMS | QK_NORMS, norm_offset=1.0, extra=GEMMA_FIELDS
    ),
}

PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FREQS = "rope_freqs.weight"
# Metadata under `<architecture>.` whose meaning `config_of` takes into account.
UNDERSTOOD = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern"),
)


class File:
    """A GGUF file, opened: plain Python metadata, and tensors that are dequantised when read.

    Raises:
      ValueError: not a GGUF file, or an architecture that is not supported, by name.
    """

    def __init__(self, path: pathlib.Path):
        import gguf

        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}: not a whole GGUF file ({error})") from error
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        name = str(self.metadata.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {name!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        self.prefix, self.architecture = f"{name}.", ARCHITECTURES[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the architecture. Its float32 numbers come back as the decimal meant."""
        value = self.metadata.get(self.prefix + name, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.path}: GGUF field {self.prefix}{name} is missing")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in numpy's order (GGUF's is the reverse)."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: GGUF tensor {name} is missing")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        import gguf

        tensor = self.tensors[name]
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name}: {error}") from error
        return np.asarray(array, np.float32).reshape(self.shape(name))


def hf_tensors(file: File, dtype: np.dtype[Any]) -> list[tensors.Writable]:
    """The file's tensors under Hugging Face names, in layer order, converted when read.

    Raises:
      ValueError: a tensor without a place in the architecture, by name.
    """
    names = {EMBEDDING: "model.embed_tokens.weight"}
    for layer in range(file.need("block_count")):
        names |= layer_names(file, layer)
    names["output_norm.weight"] = "model.norm.weight"
    if HEAD in file.tensors:
        names[HEAD] = "lm_head.weight"
    extra = [name for name in file.tensors if name not in names and name != ROPE_FREQS]
    if extra:
        raise ValueError(
            f"{file.path}: tensor {extra[0]} (and {len(extra) - 1} more) has no place in a "
            f"{file.architecture.model_type} model"
        )
    return [converted(file, theirs, ours, dtype) for theirs, ours in names.items()]


def layer_names(file: File, layer: int) -> dict[str, str]:
    """GGUF names of one layer's tensors to Hugging Face's; biases where the file has them."""
    names = {}
    for theirs, ours in {**file.architecture.norms, **PROJECTIONS}.items():
        for kind in ("weight", "bias"):
            name = f"blk.{layer}.{theirs}.{kind}"
            if kind == "weight" or name in file.tensors:
                names[name] = f"model.layers.{layer}.{ours}.{kind}"
    return names


def converted(file: File, theirs: str, ours: str, dtype: np.dtype[Any]) -> tensors.Writable:
    change = change_of(file, theirs)

    def read() -> np.ndarray:
        return tensors.finite(change(file.read(theirs)).astype(dtype), theirs, file.path)

    return tensors.Writable(ours, file.shape(theirs), dtype, read)


def change_of(file: File, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """What llama.cpp did to this tensor, undone."""
    how = file.architecture
    if how.permuted and (".attn_q." in name or ".attn_k." in name):
        heads = file.need("attention.head_count")
        heads = heads if ".attn_q." in name else file.get("attention.head_count_kv", heads)
        return lambda array: unpermuted(array, heads)
    if how.norm_offset and name.endswith("norm.weight"):
        return lambda array: array - np.float32(how.norm_offset)
    return lambda array: array


def unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's rope order to Hugging Face's.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the pair (i, i + half): row 2i of a head
    becomes row i, row 2i+1 becomes row half + i.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
