"""The decoder-only transformer, in Flax NNX inside and pure functions outside.

Layers are stacked on a leading axis and scanned, so that compile time does not grow with depth. The
module graph is split once, when the model is made; a train step never walks it.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpost import attention
from jaxpost.models import cache as caches
from jaxpost.models.model import Cache, LoRA, Model, ModelCard, Remat, Rope, TransformerConfig
from jaxpost.typing import Array, Float, Int, Params

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def lora_rank_and_scale(lora: LoRA | None, name: str) -> tuple[int, float] | None:
    """Rank and scale of the adapter on projection `name`, or None where there is none."""
    if lora is None or not any(re.fullmatch(target, name) for target in lora.targets):
        return None
    rank, alpha = dict(lora.ranks).get(name, lora.rank), dict(lora.alphas).get(name, lora.alpha)
    return rank, alpha / (math.sqrt(rank) if lora.rank_stabilized else rank)


class Linear(nnx.Module):
    """`y = x W + b`, plus a LoRA term where the configuration asks for one.

    Modules are made of zeros; `initial_values` fills them.
    """

    def __init__(self, config: TransformerConfig, name: str, d_in: int, d_out: int, bias: bool):
        self.kernel = nnx.Param(jnp.zeros((d_in, d_out)))
        self.bias = nnx.Param(jnp.zeros(d_out)) if bias else None
        adapter = lora_rank_and_scale(config.lora, name)
        self.lora_scale = adapter[1] if adapter else 0.0
        if adapter:
            self.lora_a = nnx.Param(jnp.zeros((d_in, adapter[0])))
            self.lora_b = nnx.Param(jnp.zeros((adapter[0], d_out)))
        else:
            self.lora_a = self.lora_b = None

    def __call__(self, x: Array) -> Array:
        y = product(x, self.kernel[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        if self.lora_a is not None and self.lora_b is not None:
            low = product(x, self.lora_a[...])
            y = y + self.lora_scale * product(low, self.lora_b[...])
        return y


def product(x: Float[Array, "*B D"], kernel: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """`x W` with leading axes joined: a kernel gradient over one axis needs no transposed copy."""
    y = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
    return y.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + eps) · (offset + scale)`, computed in float32."""

    def __init__(self, config: TransformerConfig, width: int):
        self.scale = nnx.Param(jnp.full(width, 1.0 - config.norm_offset))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and gated MLP, each behind a norm (and before one, if sandwiched)."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        width, kv_width = config.width, config.kv_heads * config.head_dim
        q_width = config.heads * config.head_dim
        linear = functools.partial(Linear, config)

        self.attn_norm = RMSNorm(config, width)
        self.q_proj = linear("q_proj", width, q_width, config.qkv_bias)
        self.k_proj = linear("k_proj", width, kv_width, config.qkv_bias)
        self.v_proj = linear("v_proj", width, kv_width, config.qkv_bias)
        self.o_proj = linear("o_proj", q_width, width, config.out_bias)
        self.q_norm = RMSNorm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim) if config.qk_norm else None
        self.post_attn_norm = RMSNorm(config, width) if config.sandwich_norms else None
        self.mlp_norm = RMSNorm(config, width)
        self.gate_proj = linear("gate_proj", width, config.mlp_width, config.mlp_bias)
        self.up_proj = linear("up_proj", width, config.mlp_width, config.mlp_bias)
        self.down_proj = linear("down_proj", config.mlp_width, width, config.mlp_bias)
        self.post_mlp_norm = RMSNorm(config, width) if config.sandwich_norms else None

    def queries_keys_values(
        self, x: Array, rope: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        x = self.attn_norm(x)
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        q, k = self.q_proj(x).reshape(heads), self.k_proj(x).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), self.v_proj(x).reshape(heads)

    def finish(self, x: Array, attended: Array) -> Array:
        """The rest of the layer: output projection, residual, MLP, residual."""
        y = self.o_proj(attended.reshape(*x.shape[:-1], -1))
        x = x + (self.post_attn_norm(y) if self.post_attn_norm is not None else y)
        h = self.mlp_norm(x)
        y = self.down_proj(ACTIVATIONS[self.config.activation](self.gate_proj(h)) * self.up_proj(h))
        return x + (self.post_mlp_norm(y) if self.post_mlp_norm is not None else y)


class Transformer(nnx.Module):
    """Embedding, stacked blocks, final norm and (unless tied) an output head."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        shape = (config.vocab_size, config.width)
        self.embedding = nnx.Param(jnp.zeros(shape))
        self.layers = nnx.vmap(lambda _: Block(config))(jnp.arange(config.layers))
        self.final_norm = RMSNorm(config, config.width)
        self.lm_head = None if config.tied_embeddings else nnx.Param(jnp.zeros(shape))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.embedding[...][tokens].astype(self.config.compute_dtype)
        return x * jnp.asarray(self.config.embed_scale, x.dtype)

    def __call__(self, tokens, segment_ids=None, positions=None, noise=None) -> Array:
        config = self.config
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = positions_of(segment_ids)
        x = self.embed(tokens)
        if noise is not None:
            x = x + noise.astype(x.dtype)
        ropes = Ropes(config, positions)
        graph, stacked = nnx.split(self.layers)

        def layer(x, scanned):
            params, local = scanned
            block = nnx.merge(graph, params)
            q, k, v = block.queries_keys_values(x, ropes.of(local))
            attended = attention.attend(
                q,
                k,
                v,
                segment_ids,
                positions,
                scale=config.query_scale,
                window=window_of(config, local, tokens.shape[1]),
                softcap=config.attn_softcap,
            )
            return block.finish(x, attended), None

        x, _ = jax.lax.scan(rematerialize(layer, config.remat), x, (stacked, local_layers(config)))
        return self.final_norm(x)

    def decode(self, tokens, cache: Cache, starts) -> tuple[Array, Cache]:
        config = self.config
        positions = starts[:, None] + jnp.arange(tokens.shape[1])
        ropes = Ropes(config, positions)
        graph, stacked = nnx.split(self.layers)
        length = cache.keys.shape[3]
        age = positions[:, :, None] - jnp.arange(length)
        parts = caches.parts(length)
        used = jnp.sum(jnp.max(positions) >= jnp.asarray(parts[:-1], jnp.int32))

        def layer(carry, scanned):
            x, cache = carry
            params, local, index = scanned
            block = nnx.merge(graph, params)
            q, k, v = block.queries_keys_values(x, ropes.of(local))
            cache = caches.write(cache, k, v, index, starts)
            visible = age >= 0
            window = window_of(config, local, length)
            if window is not None:
                visible &= age < window

            def attend_first(count: int):
                return lambda: attention.attend_masked(
                    q,
                    *caches.read(cache, index, count, q.dtype),
                    visible[:, :, :count],
                    scale=config.query_scale,
                    softcap=config.attn_softcap,
                )

            attended = jax.lax.switch(used, [attend_first(count) for count in parts])
            return (block.finish(x, attended), cache), None

        scanned = (stacked, local_layers(config), jnp.arange(config.layers))
        (x, cache), _ = jax.lax.scan(layer, (self.embed(tokens), cache), scanned)
        return self.final_norm(x), cache

    def head(self) -> Float[Array, "V D"]:
        return self.embedding[...] if self.lm_head is None else self.lm_head[...]


class Ropes:
    """Cosines and sines of the global rope and, where the model has one, of the local rope."""

    def __init__(self, config: TransformerConfig, positions: Int[Array, "B T"]):
        self.everywhere = rope_tables(config.rope, config.head_dim, positions)
        self.nearby = (
            rope_tables(config.rope_local, config.head_dim, positions)
            if config.rope_local is not None
            else None
        )

    def of(self, local: Array) -> tuple[Array, Array]:
        if self.nearby is None:
            return self.everywhere
        cos, sin = (
            jnp.where(local, a, b) for a, b in zip(self.nearby, self.everywhere, strict=True)
        )
        return cos, sin


def rope_tables(rope: Rope, head_dim: int, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
    """Cosine and sine [B, T, 1, head_dim/2] of every position's rotation angles."""
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies [head_dim/2] in radians a position, and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        turns = rope.original_max_positions * plain / (2 * np.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return blend * plain + (1 - blend) * plain / rope.factor, 1.0
    low, high = (
        head_dim
        * math.log(rope.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return ramp * plain / rope.factor + (1 - ramp) * plain, factor


def rotate(x: Float[Array, "B T H hd"], rope: tuple[Array, Array]) -> Float[Array, "B T H hd"]:
    """Rotates the pairs (x[i], x[i + hd/2]) by the angles of their position, in float32."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def positions_of(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that restart at 0 where the segment id changes: [1,1,2,2,2,0] → [0,1,0,1,2,0]."""
    index = jnp.arange(segment_ids.shape[1])
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def local_layers(config: TransformerConfig) -> Array:
    """For each layer, whether it sees only the last `window` positions."""
    return jnp.asarray(config.local_layers or (False,) * config.layers)


def window_of(config: TransformerConfig, local: Array, length: int) -> Array | None:
    """The layer's window, a number that hides nothing on global layers; None if none is local."""
    if config.window is None or not any(config.local_layers) or length <= config.window:
        return None
    return jnp.where(local, config.window, 1 << 30)


def rematerialize(layer, remat: Remat):
    """What the backward pass finds of a layer: all, its products and attention, or its input."""
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(attention.RESULT),
    )
    policy = dots if remat == "dots" else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def initial_values(config: TransformerConfig, shapes: Params, key: Array) -> Mapping[str, Any]:
    """Fresh parameters: matrices normal with `init_std`, norms 1, LoRA's A uniform, the rest 0.

    All are cut from one draw of normals, since each draw would compile anew; A's uniform numbers in
    ±1/√in are the normals through their distribution function.
    """
    leaves, tree = jax.tree.flatten_with_path(shapes)
    names = [path[-1].key for path, _ in leaves]
    drawn = ("embedding", "lm_head", "kernel", "lora_a")
    sizes = [leaf.size if n in drawn else 0 for n, (_, leaf) in zip(names, leaves, strict=True)]
    normals = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])

    def value(name: str, shape: tuple[int, ...], normal: Array) -> Array:
        if name == "scale":
            return jnp.full(shape, 1.0 - config.norm_offset)
        if name not in drawn:
            return jnp.zeros(shape)
        if name == "lora_a":
            normal = (2 * jax.scipy.stats.norm.cdf(normal) - 1) / math.sqrt(shape[-2])
        else:
            normal = normal * config.init_std
        return normal.reshape(shape)

    values = [
        value(name, leaf.shape, normal)
        for name, (_, leaf), normal in zip(names, leaves, normals, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def make_model(config: TransformerConfig, card: ModelCard | None = None) -> Model:
    """The model of an architecture, as pure functions. See `Model` for their signatures."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config)))
    shapes = nnx.to_pure_dict(state)

    def init(key) -> Mapping[str, Any]:
        return initial_values(config, shapes, key)

    def apply(params: Params, tokens, segment_ids=None, positions=None, noise=None):
        return nnx.merge(graph, params)(tokens, segment_ids, positions, noise)

    def head(params: Params):
        return nnx.merge(graph, params).head()

    def unembed(params: Params, hidden):
        weights = head(params).astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, weights, preferred_element_type=jnp.float32)
        if config.final_softcap is not None:
            logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
        return logits

    def decode(params: Params, tokens, cache: Cache, starts):
        return nnx.merge(graph, params).decode(tokens, cache, starts)

    init_cache = functools.partial(caches.empty, config)
    card = card or ModelCard({}, {})
    return Model(config, card, init, apply, head, unembed, init_cache, decode)


def logits(
    model: Model,
    params: Params,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Next-token logits [B, T, V] in float32: `logits[b, t]` scores the token after `tokens[b, t]`.

    Without `segment_ids` each row is one sequence; with them, attention stays inside a segment
    (0 is padding by convention, on either side). Without `positions`, they restart with each
    segment.
    """
    return model.unembed(params, model.apply(params, tokens, segment_ids, positions))
