"""Weights of terms that change from one rollout to the next; each is a source of state."""

from typing import Any

from jaxpost import coefficients


class EntropyController:
    """The weight of the entropy bonus: fixed, or adapting to a `target` in nats a token.

    It goes by the entropy that the update of the last rollout measured, and counts only where that
    is at most the target: never in the first rollout.
    """

    def __init__(self, coef: float, target: float | None, step: float):
        self._coef, self._target, self._step = coef, target, step
        self._entropy: float | None = None

    @property
    def weight(self) -> float:
        """Of the rollout that comes."""
        if self._target is None:
            return self._coef
        low = self._entropy is not None and self._entropy <= self._target
        return self._coef if low else 0.0

    def adapt(self, entropy: float) -> None:
        """`entropy` in nats a token, of the last rollout."""
        if self._target is not None:
            moved, _ = coefficients.adaptive_entropy(
                self._coef, entropy, target=self._target, step=self._step
            )
            self._coef, self._entropy = float(moved), entropy

    def get_state(self) -> dict[str, Any]:
        return {"coef": self._coef, "entropy": self._entropy}

    def set_state(self, state: dict[str, Any]) -> None:
        self._coef, self._entropy = state["coef"], state["entropy"]


class KLController:
    """`kl_coef`: fixed, or adapting to a `target` in nats a completion."""

    def __init__(self, kl_coef: float, target: float | None, horizon: float):
        self.kl_coef, self._target, self._horizon = kl_coef, target, horizon

    def adapt(self, kl: float, completions: int) -> None:
        """`kl` in nats a completion, of the last rollout."""
        if self._target is not None:
            moved = coefficients.adaptive_kl(
                self.kl_coef, kl, completions, target=self._target, horizon=self._horizon
            )
            self.kl_coef = float(moved)

    def get_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def set_state(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
