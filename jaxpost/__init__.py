"""Post-training of language models in JAX: losses, log-probabilities, train steps and rollouts.

    import jax, jax.numpy as jnp, optax
    from jaxpost import init_state, load_model, losses, make_train_step, token_logps

    model, params = load_model("path/or/hub-id")

    def objective(params, batch):                # a sum, weighted over the whole update
        loss = jnp.sum(batch.loss_weights * losses.nll(token_logps(model, params, batch)))
        return loss, {}

    optimizer = optax.adamw(1e-5)
    train_step = jax.jit(make_train_step(objective, optimizer, microbatches=2), donate_argnums=0)
    state, metrics = train_step(init_state(params, optimizer), batch)

`batch` is any pytree with the fields that the objective reads; `TokenBatch` is one, and
`token_batch` makes it. A name is imported when it is first asked for, so that data workers, which
need none, start without the code of models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpost import (
        advantages,
        coefficients,
        loss_weights,
        losses,
        metrics,
        optimizers,
        sampling,
    )
    from jaxpost.batch import TokenBatch, token_batch
    from jaxpost.hub import init_model, load_model, save_model
    from jaxpost.logps import token_logps, token_loss, token_scores
    from jaxpost.models import LoRA, Model, TransformerConfig, logits, make_model
    from jaxpost.rollout import sample
    from jaxpost.train_step import TrainState, init_state, make_train_step

HOMES = {
    "batch": ("TokenBatch", "token_batch"),
    "hub": ("init_model", "load_model", "save_model"),
    "logps": ("token_logps", "token_loss", "token_scores"),
    "models": ("LoRA", "Model", "TransformerConfig", "logits", "make_model"),
    "rollout": ("sample",),
    "train_step": ("TrainState", "init_state", "make_train_step"),
}

__all__ = [
    "LoRA",
    "Model",
    "TokenBatch",
    "TrainState",
    "TransformerConfig",
    "advantages",
    "coefficients",
    "init_model",
    "init_state",
    "load_model",
    "logits",
    "loss_weights",
    "losses",
    "make_model",
    "make_train_step",
    "metrics",
    "optimizers",
    "sample",
    "sampling",
    "save_model",
    "token_batch",
    "token_logps",
    "token_loss",
    "token_scores",
]


def __getattr__(name: str) -> Any:
    """The public names, from the modules that hold them (PEP 562)."""
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxpost.{home}"), name)
    if name in __all__:
        return importlib.import_module(f"jaxpost.{name}")
    raise AttributeError(f"module 'jaxpost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
