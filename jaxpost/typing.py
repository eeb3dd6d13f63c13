"""Array types with named axes: B sequences, T positions, V vocabulary, D width.

The names are plain annotations at run time; the tests turn them into checks with jaxtyping's import
hook, so a wrong shape fails there and costs nothing in training.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Key, Shaped

if TYPE_CHECKING:
    from jaxtyping import Array
else:
    Array = jax.Array | np.ndarray  # functions of arrays take NumPy's too

PerToken = Float[Array, "*B T"]
PerSequence = Float[Array, "*B"]
Tokens = Int[Array, "*B T"]
Mask = Bool[Array, "*B T"]
Hidden = Float[Array, "*B T D"]
Logits = Float[Array, "*B T V"]
Scalar = Float[Array, ""]
PRNGKey = Key[Array, ""] | Shaped[Array, "2"]
Params = Mapping[str, Any]

__all__ = [
    "Array",
    "Bool",
    "Float",
    "Hidden",
    "Int",
    "Logits",
    "Mask",
    "PRNGKey",
    "Params",
    "PerSequence",
    "PerToken",
    "Scalar",
    "Shaped",
    "Tokens",
]
