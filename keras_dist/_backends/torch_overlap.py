"""torch: reducing gradients while backpropagation goes on. Knows no MPI and no Keras.

A hook on every parameter is told when its gradient is there. Once all gradients of a bucket are,
the bucket is queued, in the order of the buckets, and a thread of the engine reduces it where
it lies. The hooks act only within a train step, which all ranks make alike: a backward pass that
a script makes by itself, perhaps on one rank only, starts nothing.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from keras_dist._backends.torch_tensors import to_numpy
from keras_dist._compat.torch import writes_to

__all__ = ["Arrivals", "in_train_step", "mark_of", "reduce_dense"]

_step = threading.local()
# By parameter: what starts the reduction of its gradient, or has ceased to.
_overlaps: Any = WeakTensorKeyDictionary()


@contextlib.contextmanager
def in_train_step() -> Iterator[None]:
    """Returns a context in which backward passes are those of a train step."""
    before, _step.is_on = _is_in_step(), True
    try:
        yield
    finally:
        _step.is_on = before


def reduce_dense(
    fused: Any,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> list[np.ndarray]:
    """Reduces dense gradients, or takes the results where that was done on the way.

    Args:
        fused: the plan, see `Backend.reduce_gradients`.
        parameters: what the gradients are of, in the order of the plan.
        gradients: this rank's gradients.

    Returns:
        The reduced arrays, in the order given.
    """
    known = {id(one): one for p in parameters if (one := _overlaps.get(p)) and one.is_alive()}
    for overlap in known.values():
        reduced = overlap.take(gradients) if overlap.is_for(fused) else None
        if reduced is not None:
            return reduced
        # A plan of other gradients, or these have changed since they came: a step is more here
        # than one backward pass and one update, so nothing is started on the way any more.
        overlap.stop()
    results: list[np.ndarray] = fused([to_numpy(gradient) for gradient in gradients])
    begins = fused.overlaps and _is_in_step() and not known
    if begins and _are_gradients_of(parameters, gradients):
        overlap = _Overlap(fused, parameters)
        _overlaps.update((parameter, overlap) for parameter in parameters)
    return results


class Arrivals:
    """The gradients of a plan that have come; queues each bucket once it is complete.

    Buckets are queued in the order of the plan: on all ranks alike, whatever comes first.

    Args:
        fused: the plan.
    """

    def __init__(self, fused: Any):
        self._fused = fused
        self._arrays: dict[int, np.ndarray] = {}  # that have come and are not queued
        self._handles: list[Any] = []

    def come(self, place: int, array: np.ndarray) -> None:
        """Takes a gradient, and queues the buckets that it completes.

        Args:
            place: which one of the plan.
            array: it must stay as it is until the results are there.
        """
        self._arrays[place] = array
        for number in range(len(self._handles), len(self._fused.buckets)):
            members = [slot.index for slot in self._fused.buckets[number].slots]
            if not all(member in self._arrays for member in members):
                return
            arrays = [self._arrays.pop(member) for member in members]
            self._handles.append(self._fused.queue_bucket(number, arrays))

    def are_all(self) -> bool:
        """Tells whether all gradients have come."""
        return len(self._handles) == len(self._fused.buckets)

    def results(self) -> list[np.ndarray]:
        """Waits for the reduced gradients, all of which have come; in the order of the plan."""
        reduced: dict[int, np.ndarray] = {}
        for bucket, handle in zip(self._fused.buckets, self._handles, strict=True):
            indices = [slot.index for slot in bucket.slots]
            reduced.update(zip(indices, handle.wait(), strict=True))
        return [reduced[place] for place in range(len(reduced))]

    def wait(self) -> None:
        """Waits until what has been queued has ended, well or not."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()


class _Overlap:
    """Starts the reduction of a plan's buckets as the gradients of some parameters come.

    Args:
        fused: the plan.
        parameters: leaves of the graph of gradients, in the order of the plan.
    """

    def __init__(self, fused: Any, parameters: Sequence[torch.Tensor]):
        self._fused = weakref.ref(fused)  # a plan among ranks that have been left may go
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._come, place))
            for place, parameter in enumerate(parameters)
        ]
        self._begin()

    def is_alive(self) -> bool:
        """Tells whether its plan is still there."""
        return self._fused() is not None

    def is_for(self, fused: Any) -> bool:
        """Tells whether it starts the buckets of a plan."""
        return bool(self._hooks) and self._fused() is fused

    def stop(self) -> None:
        """Starts no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._begin()

    def take(self, gradients: Sequence[torch.Tensor]) -> list[np.ndarray] | None:
        """Waits for the results; `None` where these gradients are not what was reduced."""
        arrivals, marks = self._arrivals, self._marks
        self._begin()
        same = marks == {place: mark_of(gradient) for place, gradient in enumerate(gradients)}
        return arrivals.results() if same and arrivals is not None and arrivals.are_all() else None

    def _begin(self) -> None:
        self._arrivals: Arrivals | None = None
        self._marks: dict[int, Any] = {}

    def _come(self, place: int, parameter: torch.Tensor) -> None:
        """Takes note of a gradient that is there, and queues the buckets that it completes."""
        fused = self._fused()
        gradient = parameter.grad
        if fused is None or gradient is None or not _is_in_step():
            return
        if place in self._marks:
            # The second one since the last update. What was queued runs, and is for nobody.
            self.stop()
            return
        self._marks[place] = mark_of(gradient)
        self._arrivals = self._arrivals or Arrivals(fused)
        self._arrivals.come(place, to_numpy(gradient))


def _is_in_step() -> bool:
    return getattr(_step, "is_on", False)


def mark_of(gradient: torch.Tensor) -> Any:
    """Returns what changes when a gradient is another one or has been written to."""
    return gradient.data_ptr(), writes_to(gradient), gradient.shape


def _are_gradients_of(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> bool:
    """Tells whether gradients are those that backpropagation left, in memory of the host."""
    return all(
        parameter.is_leaf
        and parameter.grad is not None
        and parameter.device.type == "cpu"
        and mark_of(parameter.grad) == mark_of(gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
