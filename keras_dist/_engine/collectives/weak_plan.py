"""The plan of a reduction as the graph of a framework refers to it, without keeping it.

A framework may keep a graph, with its host functions, for the life of the process; a plan holds
shared memory. So graphs refer to a plan weakly, and it ends with its owner, such as an optimizer.
"""

import weakref
from collections.abc import Callable
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.rendezvous import report_error
from keras_dist._engine.communicator import Communicator


class WeakPlan:
    """A function that returns a plan while it exists."""

    def __init__(self, plan: Any, operation: str, ranks: Callable[[], Communicator]):
        self._plan, self._operation, self._ranks = weakref.ref(plan), operation, ranks

    def __call__(self) -> Any:
        """Returns the plan. Collective if it has ended on this rank: every rank raises.

        When a plan ends, which garbage collection decides, differs between ranks.
        """
        plan = self._plan()
        if plan is not None:
            return plan
        comm = self._ranks()
        error = errors.BackendError(
            comm.where(),
            f"{self._operation} by the optimizer or the variables of a compiled step",
            "a step that outlives them",
            "Keep the optimizer and the model while their step is used, or trace a new step.",
        )
        report_error(comm, self._operation, error)
        raise error
