"""The two samplers of a pair: each draws one of its completions.

A sampler's logits are w · z_policy + (1 − w) · z_reference, mixed before anything is cut off.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpost import train_step
from jaxpost.data.prompts import Prompt
from jaxpost.models import mixture
from jaxpost.models.model import Model
from jaxpost.recipes import draws, experience, setup
from jaxpost.rollout import Rollout
from jaxpost.typing import Array, Params

# Names to the policy's weight w of the first and of the second sampler.
SAMPLERS = {
    "policy": (1.0, 1.0),
    "reference": (1.0, 0.0),
    "opponent": (1.0, 0.5),
    "mixture": (1.5, 0.5),
}


def make_draw(name: str, policy: setup.Policy, reference: Params | None) -> draws.Draw:
    """What draws the completions of prompts, called as `draws.drawn` is.

    `reference` are the parameters that are trained, as they were (`experience.starting_point`).
    """
    if name == "policy":
        return draws.drawn
    assert reference is not None  # the recipe keeps one for these
    models = [model_of(weight, policy.model) for weight in SAMPLERS[name]]

    def drawn(
        policy: setup.Policy,
        params: Params,
        prompts: Sequence[Prompt],
        key: Array,
        config: experience.RolloutConfig,
        *,
        sample_ids: Sequence[int],
        begun: None,
    ) -> Iterator[tuple[int, Rollout]]:
        """(p, the two completions of prompt p), once all are drawn."""
        one = dataclasses.replace(config, completions=1)
        frozen = train_step.merge(reference, params, policy.trainable)
        found = []
        for number, weight in enumerate(SAMPLERS[name]):
            sampler = policy._replace(model=models[number])
            own, ids = params_of(weight, params, frozen), sample_ids[number::2]
            found.append(dict(draws.drawn(sampler, own, prompts, key, one, sample_ids=ids)))
        for p in range(len(prompts)):
            yield p, Rollout(*map(np.concatenate, zip(*(each[p] for each in found), strict=True)))

    return drawn


def model_of(weight: float, model: Model) -> Model:
    """The model whose logits a sampler draws from."""
    if weight in (0.0, 1.0):
        return model
    return mixture.mixture(model, {"policy": weight, "reference": 1.0 - weight})


def params_of(weight: float, params: Params, frozen: Params) -> dict[str, Any] | Params:
    """What `model_of` takes."""
    if weight in (0.0, 1.0):
        return params if weight else frozen
    return {"policy": params, "reference": frozen}
