"""How many FLOPs a token takes, and how many a second this machine gives."""

import time

import jax
import jax.numpy as jnp

from jaxpost.models import transformer
from jaxpost.models.model import TransformerConfig


def matmul_params(config: TransformerConfig) -> tuple[int, int]:
    """Weights that each token is multiplied with: (of the model, of its LoRA adapters).

    Attention and MLP projections and the output head count, tied or not; the embedding look-up,
    norms and biases do no matrix product.
    """
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "q_proj": (config.width, heads),
        "k_proj": (config.width, kv),
        "v_proj": (config.width, kv),
        "o_proj": (heads, config.width),
        "gate_proj": (config.width, config.mlp_width),
        "up_proj": (config.width, config.mlp_width),
        "down_proj": (config.mlp_width, config.width),
    }
    model = adapters = 0
    for name, (rows, columns) in linears.items():
        model += config.layers * rows * columns
        adapter = transformer.lora_rank_and_scale(config.lora, name)
        adapters += config.layers * adapter[0] * (rows + columns) if adapter is not None else 0
    return model + config.vocab_size * config.width, adapters


def mean_context(length: float, window: int | None = None) -> float:
    """Positions that causal attention sees, itself included, averaged over a row of this length.

    (T + 1) / 2 without a window; with a window w < T, (w (w + 1) / 2 + (T - w) w) / T.
    """
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def train_flops_per_token(
    config: TransformerConfig, length: float, *, adapters_only: bool = False
) -> float:
    """FLOPs of forward and backward for one token of a row of `length`, without recomputation.

    6 N + 12 · heads · head_dim · (sum over layers of the mean context): a product with N weights is
    2 N forward, 2 N for the gradient of its input and 2 N for that of the weights; scores and their
    product with the values are 2 · 2 · heads · head_dim · context forward and twice that backward.
    With `adapters_only` (LoRA) the model's own weights need no gradient: 4 N + 6 N_lora.
    A packed row counts as the length of its segments, so give their mean length.
    """
    model, adapters = matmul_params(config)
    local = sum(config.local_layers)
    context = (config.layers - local) * mean_context(length) + local * mean_context(
        length, config.window
    )
    products = (4 if adapters_only else 6) * model + 6 * adapters
    return products + 12 * config.heads * config.head_dim * context


def measure_matmul_peak(
    dtype: str = "float32", *, sizes: tuple[int, ...] | None = None, seconds: float = 0.2
) -> float:
    """FLOP/s of square matrix products: the best one of every size's, at least 3 in `seconds` each.

    On a CPU the sizes are 512, 1024 and 2048: where other jobs share its cores, only a short
    product now and then runs undisturbed. On accelerators it is 8192. It is the figure of one
    device, on which recipes train. Products of `float32` use JAX's default precision, as training
    does.
    """
    sizes = sizes or ((512, 1024, 2048) if jax.default_backend() == "cpu" else (8192,))
    return max(2 * size**3 / _quickest_product(size, dtype, seconds) for size in sizes)


def _quickest_product(size: int, dtype: str, seconds: float) -> float:
    product = jax.jit(jnp.matmul)
    left = jnp.full((size, size), 0.5, dtype)
    jax.block_until_ready(product(left, left))
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(product(left, left))
        times.append(time.perf_counter() - start)
    return min(times)
