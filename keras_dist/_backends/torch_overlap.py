"""Overlaps the reduction of gradients with backpropagation on torch, see decision 23.

The hooks of parameters act only within a train step, which is the same on all ranks: a backward
pass that a script calls itself, possibly on one rank only, queues nothing.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from keras_dist._backends.torch_tensors import is_on_device, to_array
from keras_dist._compat.torch import weak_tensor_keys, writes_to
from keras_dist._gpu import uniform

_step = threading.local()


@functools.cache
def _overlaps() -> Any:
    """Returns the overlap that queues the gradient of each parameter, also if it has stopped."""
    return weak_tensor_keys()


@contextlib.contextmanager
def in_train_step() -> Iterator[None]:
    """Returns a context in which backward passes belong to a train step."""
    before = _is_in_step()
    _step.is_on = True
    try:
        yield
    finally:
        _step.is_on = before


def reduce_dense(
    fused: Any,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> list[Any]:
    """Reduces dense gradients, or returns the results of an overlapped reduction."""
    overlaps = {id(o): o for p in parameters if (o := _overlaps().get(p)) and o.is_alive()}
    for overlap in overlaps.values():
        reduced = overlap.take(gradients) if overlap.is_for(fused) else None
        if reduced is not None:
            return reduced
        # The plan is another, or the gradients have changed since they were queued: a step is more
        # than one backward pass and one update. So the overlap stops for good.
        overlap.stop()
        overlap.reduce_again()
    results: list[Any] = fused(uniform([to_array(gradient) for gradient in gradients]))
    starts = fused.overlaps and _is_in_step() and not overlaps
    if starts and _are_gradients_of(parameters, gradients):
        overlap = _Overlap(fused, parameters)
        _overlaps().update((parameter, overlap) for parameter in parameters)
    return results


class ReadyGradients:
    """The gradients of a plan that are ready; queues complete buckets in the order of the plan.

    The last bucket waits for `results`: until then no rank has all results, so a rank whose
    gradients change after they were queued can make all ranks reduce again.
    """

    def __init__(self, fused: Any):
        self._fused = fused
        self._last = len(fused.buckets) - 1
        self._arrays: dict[int, Any] = {}  # ready but not queued
        self._handles: list[Any] = []

    @property
    def has_begun(self) -> bool:
        """Whether a bucket is queued."""
        return bool(self._handles)

    def add(self, index: int, array: Any) -> None:
        self._arrays[index] = array
        while len(self._handles) < self._last and self._is_next_complete():
            self._queue_next()

    def is_complete(self) -> bool:
        return len(self._handles) == self._last and self._is_next_complete()

    def _is_next_complete(self) -> bool:
        return all(member in self._arrays for member in self._members_of_next())

    def _members_of_next(self) -> list[int]:
        return [slot.index for slot in self._fused.buckets[len(self._handles)].slots]

    def _queue_next(self) -> None:
        arrays = [self._arrays.pop(member) for member in self._members_of_next()]
        self._handles.append(self._fused.queue_bucket(len(self._handles), arrays))

    def results(self) -> list[Any]:
        """Waits for the reduced gradients and returns them in the order of the plan."""
        self._queue_next()
        reduced: dict[int, Any] = {}
        try:
            for bucket, handle in zip(self._fused.buckets, self._handles, strict=True):
                indices = [slot.index for slot in bucket.slots]
                reduced.update(zip(indices, handle.wait(), strict=True))
        except Exception:
            self.wait()  # none may follow what the ranks do next
            raise
        return [reduced[index] for index in range(len(reduced))]

    def wait(self) -> None:
        """Waits until the queued reductions have ended, successfully or not."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()


class _Overlap:
    """Queues the buckets of a plan as the gradients of its parameters become ready."""

    def __init__(self, fused: Any, parameters: Sequence[torch.Tensor]):
        self._fused = weakref.ref(fused)  # a plan ends when ranks leave the job
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._add, index))
            for index, parameter in enumerate(parameters)
        ]
        self._is_in_vain = False  # whether buckets are queued whose results nobody uses
        self._reset()

    def is_alive(self) -> bool:
        return self._fused() is not None

    def is_for(self, fused: Any) -> bool:
        return bool(self._hooks) and self._fused() is fused

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_in_vain |= self._ready is not None and self._ready.has_begun
        self._reset()

    def reduce_again(self) -> None:
        """Makes all ranks reduce again if buckets are queued in vain: not so on other ranks."""
        fused, is_in_vain = self._fused(), self._is_in_vain
        self._is_in_vain = False
        if is_in_vain and fused is not None:
            fused.reduce_again()

    def take(self, gradients: Sequence[torch.Tensor]) -> list[Any] | None:
        """Waits for the results; returns `None` if other gradients were reduced."""
        ready, versions = self._ready, self._versions
        same = versions == {i: version_of(gradient) for i, gradient in enumerate(gradients)}
        if not same or ready is None or not ready.is_complete():
            return None
        self._reset()
        return ready.results()

    def _reset(self) -> None:
        self._ready: ReadyGradients | None = None
        self._versions: dict[int, Any] = {}

    def _add(self, index: int, parameter: torch.Tensor) -> None:
        fused = self._fused()
        gradient = parameter.grad
        if fused is None or gradient is None or gradient.is_sparse or not _is_in_step():
            return
        if index in self._versions:
            # The second gradient since the last update. Queued reductions run; nobody uses them.
            self.stop()
            return
        self._versions[index] = version_of(gradient)
        self._ready = self._ready or ReadyGradients(fused)
        self._ready.add(index, to_array(gradient))


def _is_in_step() -> bool:
    return getattr(_step, "is_on", False)


def version_of(gradient: torch.Tensor) -> Any:
    """Returns a value that changes if a gradient is replaced or written to."""
    return gradient.data_ptr(), writes_to(gradient), gradient.shape


def _are_gradients_of(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> bool:
    """Returns whether gradients are those from backpropagation, read where they are."""
    places = {is_on_device(parameter) for parameter in parameters}
    return len(places) == 1 and all(
        parameter.is_leaf
        and parameter.grad is not None
        and not parameter.grad.is_sparse
        and (parameter.is_cpu or is_on_device(parameter))
        and version_of(parameter.grad) == version_of(gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
