"""Next-token pretraining: plain text, packed, every token a target.

The recipe is `sft`, whose defaults are those of pretraining too: rows are packed, long texts are
cut into rows without losing a target, and plain text has no mask. It starts from random weights
(`model.fresh`) or goes on from a model (`model.path`).

    jaxpost train my_pretraining.yaml
"""

import dataclasses

from jaxpost.recipes import sft
from jaxpost.recipes.sft import make_data, train

__all__ = ["Config", "make_data", "train"]


@dataclasses.dataclass(frozen=True)
class Config(sft.Config):
    """Next-token training on plain text."""
