"""Next-token pretraining: plain text, packed, every token a target.

The recipe is that of `sft` with the defaults of pretraining: packing on, long texts cut into rows
without losing a target, no mask. It starts from random weights (`model.fresh`) or goes on from a
model (`model.path`).

    jaxpost train configs/pretrain_tiny_arithmetic.yaml
"""

import dataclasses

from jaxpost.data import sources
from jaxpost.options import option
from jaxpost.recipes import sft
from jaxpost.recipes.sft import make_data, train

__all__ = ["Config", "make_data", "train"]


@dataclasses.dataclass(frozen=True)
class Config(sft.Config):
    """Next-token training on plain text."""

    data: sources.DataConfig = option(help="what to train on")
