"""Rewards: what judges a completion, and the processes in which it does.

A reward is `(completion, example) -> float | None | Score`; `signatures` has the other forms that
are taken as they are. Parts: `score` (what is asked and answered), `config`, `scorer` (submit,
result), `workers` and `processes` (the trainer's side), `worker` and `forks` (the process's own),
`resolve` (import paths), `gold` (a row's right answer), `combine` (rewards of several sources),
`duels` (a judge of pairs), `sandbox`; verifiers: `math`, `exact`, `formats`, `code`, `theorems`,
`gym` and others.
"""

from jaxpost.rewards.config import Part, RewardConfig
from jaxpost.rewards.duels import Duels, JudgeConfig
from jaxpost.rewards.score import InfrastructureError, Item, Score, Scored
from jaxpost.rewards.scorer import Pending, Scorer
from jaxpost.rewards.workers import RewardError

__all__ = [
    "Duels",
    "InfrastructureError",
    "Item",
    "JudgeConfig",
    "Part",
    "Pending",
    "RewardConfig",
    "RewardError",
    "Score",
    "Scored",
    "Scorer",
]
