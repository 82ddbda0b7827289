"""Error feedback: what a rank has not sent of its gradients, which it adds to the next ones.

For each variable, the updates so far and the mean of the errors of all ranks add up to the mean of
the gradients so far. So whatever changes the errors must keep their mean.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Feedback:
    """What a rank keeps of the gradients of one optimizer, by the key of the variable."""

    step: int = 0  # number of updates; equal on all ranks
    #: flat arrays, what this rank has not sent; columns onto which the next gradients are projected
    errors: dict[Hashable, np.ndarray] = dataclasses.field(default_factory=dict)
    bases: dict[Hashable, np.ndarray] = dataclasses.field(default_factory=dict)
    agreed: Any = None  # the ranks that have made sure that the bases are equal
    keys: Sequence[Hashable] = ()  # in the order of all ranks, where plans have some of them each

    def error(self, key: Hashable, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns the error of a variable; zeros if there is none of this size and dtype."""
        found = self.errors.get(key)
        if found is None or found.shape != (count,) or found.dtype != dtype:
            found = self.errors[key] = np.zeros(count, dtype)
        return found

    def give(self, keys: Sequence[Hashable]) -> dict[str, Any]:
        """Returns the state as values to save, by the index of the variable among `keys`."""
        indexed = list(enumerate(keys))
        errors = {index: self.errors[key] for index, key in indexed if key in self.errors}
        bases = {index: self.bases[key] for index, key in indexed if key in self.bases}
        return {"step": self.step, "errors": errors, "bases": bases}

    def take(
        self, keys: Sequence[Hashable], states: Sequence[dict[str, Any]], scale: float
    ) -> None:
        """Takes the states of ranks; the errors of this rank are their sums times `scale`."""
        self.step, self.agreed = states[0]["step"], None
        self.bases = {keys[index]: basis for index, basis in states[0]["bases"].items()}
        self.errors = {}
        for state in states:
            for index, error in state["errors"].items():
                total = self.error(keys[index], error.size, error.dtype)
                total += error * error.dtype.type(scale)
