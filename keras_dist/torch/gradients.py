"""The gradients of an optimizer's parameters: watched as they come, and reduced over the ranks.

A hook on every parameter is told when a gradient has been added to it. Once a parameter has as
many as make a step, its gradient counts, and buckets that are complete are reduced while the
backward pass goes on. The first time all are reduced at the end: only then is it known which
parameters have gradients, and of what kind.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from keras_dist import _engine, errors, runtime
from keras_dist._backends.torch_overlap import Arrivals, mark_of
from keras_dist._backends.torch_tensors import dtype_of, to_numpy, to_torch, write_into
from keras_dist.ops.gradient_plans import GradientPlans
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.ops.tensor_compression import compressed, decompressed, is_done_here
from keras_dist.torch import sync_ops

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one optimizer.

    Args:
        options: how they are reduced.
        compression: of torch's tensors; what the engine does about it is in the options.
        names: what parameters are called in messages, by their ids.
    """

    def __init__(self, options: ReductionOptions, compression: Any, names: dict[int, str]):
        self.passes = options.passes
        self.are_reduced = False  # and nothing has come since
        self._options = options
        self._compression = compression
        self._names = names
        self._plans = GradientPlans(options)
        self._watched: Any = WeakTensorKeyDictionary()  # the number of each
        self._counts: dict[int, int] = {}  # by number: gradients since the last step
        self._layout: _Layout | None = None  # of the last step
        self._arrivals: Arrivals | None = None
        self._marks: dict[int, Any] = {}  # by place: of gradients that have been queued
        self._contexts: dict[int, Any] = {}

    @property
    def process_set(self) -> Any:
        """The ranks that reduce among themselves."""
        return self._options.process_set

    def is_shared(self) -> bool:
        """Tells whether there are other ranks to reduce with."""
        return runtime.includes_me(self.process_set) and self._communicator().size > 1

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begins to watch those parameters that train and are not watched yet."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = len(self._watched)
                me = weakref.WeakMethod(self._come)
                parameter.register_post_accumulate_grad_hook(_telling(me))

    def check_idle(self) -> None:
        """Checks that no gradients are on their way.

        Raises:
            UsageError: some are.
        """
        if any(count >= self.passes for count in self._counts.values()) and self.is_shared():
            raise errors.UsageError(
                errors.explain(
                    runtime.where(),
                    "zero_grad before backward, or after step or synchronize",
                    "it between them, while gradients are being reduced",
                    "Call optimizer.step() or optimizer.synchronize() first; with a GradScaler "
                    "synchronize() before its unscale_ and step, or it skips a step on one rank.",
                )
            )

    def begin_anew(self) -> None:
        """Forgets the gradients that have come, when those on their way have ended."""
        self._drop_arrivals()
        self._begin()
        self.are_reduced = False

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reduces the gradients, or waits for those that are on their way. Collective; blocks.

        A parameter that has none on this rank brings zeros, as it may have one on another. Where no
        rank has one there is none afterwards, so that decay and momentum leave it alone.

        Args:
            parameters: those of the optimizer, trained or not.
        """
        self.watch(parameters)
        self.are_reduced = True
        if not self.is_shared():
            self._begin()
            return
        trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        has = [parameter.grad is not None for parameter in trained]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        try:
            for parameter, anywhere in zip(trained, self._reduce(trained, has), strict=True):
                if not anywhere:
                    parameter.grad = None
        finally:
            self._begin()

    def _reduce(self, trained: Sequence[torch.Tensor], which: list[bool]) -> list[bool]:
        """Reduces gradients; which of them this rank has travels with them.

        Returns:
            Which of them a rank has.
        """
        sparse = [p for p in trained if p.grad.is_sparse and not self._options.dense]
        kept = {id(parameter) for parameter in sparse}
        dense = [parameter for parameter in trained if id(parameter) not in kept]
        has = np.array(which, self._dtype_beside(dense))
        layout = self._layout
        if self._arrivals is None or layout is None or not self._are_on_their_way(layout, dense):
            self._drop_arrivals()
            layout = self._layout = self._lay_out(dense, has)
            results = layout.plan([*(self._brought(parameter) for parameter in dense), has])
        else:
            for place, parameter in enumerate(dense):
                if place not in self._marks:
                    self._arrivals.come(place, self._brought(parameter))
            self._arrivals.come(len(dense), has)
            results = self._arrivals.results()
        anywhere: list[bool] = (results.pop() != 0).tolist()
        for parameter, array in zip(dense, results, strict=True):
            self._take(parameter, array)
        for parameter in sparse:
            parameter.grad = sync_ops.sparse_allreduce(
                parameter.grad, op=self._options.op, process_set=self.process_set
            )
        return anywhere

    def _come(self, parameter: torch.Tensor) -> None:
        """Counts a gradient that has been added, and starts what it completes."""
        self.are_reduced = False
        number = self._watched[parameter]
        count = self._counts[number] = self._counts.get(number, 0) + 1
        if count < self.passes or not self.is_shared():
            return
        if count > self.passes:
            self._drop_arrivals()
            self._begin()
            raise errors.UsageError(
                errors.explain(
                    runtime.where(),
                    f"{self._name(parameter)} {self.passes} times for each step",
                    "one more, before step or synchronize",
                    "Pass backward_passes_per_step, to add up as many before they are reduced.",
                )
            )
        layout = self._layout
        if layout is None or not layout.plan.overlaps:
            return
        place = layout.place_of(parameter)
        if place is not None and layout.plan.comm is self._communicator():
            self._arrivals = self._arrivals or Arrivals(layout.plan)
            self._marks[place] = _mark_of(parameter)
            self._arrivals.come(place, self._brought(parameter))

    def _are_on_their_way(self, layout: "_Layout", dense: Sequence[torch.Tensor]) -> bool:
        """Tells whether the gradients that were queued are still what they were."""
        return layout.is_of(dense) and all(
            mark == _mark_of(dense[place]) for place, mark in self._marks.items()
        )

    def _lay_out(self, dense: Sequence[torch.Tensor], has: np.ndarray) -> "_Layout":
        specs = [*((tuple(p.grad.shape), self._dtype(p)) for p in dense), (has.shape, has.dtype)]
        names = [*(self._name(parameter) for parameter in dense), "which gradients there are"]
        plan = self._plans(self._communicator(), names, specs, self._options.grouped(dense))
        return _Layout(plan, dense)

    def _brought(self, parameter: torch.Tensor) -> np.ndarray:
        """Returns what this rank brings to the reduction of a gradient."""
        gradient: Any = parameter.grad
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        [brought], self._contexts[id(parameter)] = compressed(self._compression, [whole])
        return to_numpy(brought)

    def _take(self, parameter: torch.Tensor, array: np.ndarray) -> None:
        """Puts a result into the gradient, where it lies; it was lent."""
        gradient: Any = parameter.grad
        contexts = self._contexts.pop(id(parameter))
        if not gradient.is_sparse and not is_done_here(self._compression):
            write_into(gradient, array)
            return
        [like], _ = compressed(self._compression, [torch.empty(0, dtype=gradient.dtype)])
        [result] = decompressed(self._compression, [to_torch(array, like)], contexts)
        result = result.to(gradient.device)
        if gradient.is_sparse:
            parameter.grad = result.to_sparse(gradient.sparse_dim())
        else:
            gradient.copy_(result)

    def _dtype_beside(self, dense: Sequence[torch.Tensor]) -> np.dtype:
        """Returns the dtype of the last floats that travel: what has it needs no bucket more."""
        likes = map(self._like, reversed(dense))
        floats = (like for like in likes if like.is_floating_point())
        return dtype_of(next(floats, torch.empty(0)))

    def _dtype(self, parameter: torch.Tensor) -> np.dtype:
        return dtype_of(self._like(parameter))

    def _like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor of what a gradient is compressed to."""
        gradient: Any = parameter.grad
        like: torch.Tensor
        [like], _ = compressed(self._compression, [torch.empty(0, dtype=gradient.dtype)])
        return like

    def _name(self, parameter: torch.Tensor) -> str:
        number = self._watched[parameter]
        return f"the gradient of {self._names.get(id(parameter), f'parameter {number}')}"

    def _communicator(self) -> _engine.Communicator:
        return self._options.ranks()

    def _drop_arrivals(self) -> None:
        """Waits for what is on its way, for nobody: the gradients have become others."""
        if self._arrivals is not None:
            self._arrivals.wait()
            self._arrivals = None

    def _begin(self) -> None:
        self._arrivals = None
        self._marks.clear()
        self._counts.clear()


class _Layout:
    """Which gradient stands where in a plan."""

    def __init__(self, plan: _engine.FusedAllreduce, parameters: Sequence[torch.Tensor]):
        self.plan = plan
        self._ids = [id(parameter) for parameter in parameters]
        self._kinds = [_kind(parameter) for parameter in parameters]
        self._places = {which: place for place, which in enumerate(self._ids)}

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Tells whether these gradients are those of the plan."""
        return self._kinds == [_kind(parameter) for parameter in parameters]

    def place_of(self, parameter: torch.Tensor) -> int | None:
        """Returns where a gradient stands; `None` where it does not, or has become another."""
        place = self._places.get(id(parameter))
        return place if place is None or self._kinds[place] == _kind(parameter) else None


def _kind(parameter: torch.Tensor) -> Any:
    gradient: Any = parameter.grad
    return id(parameter), gradient.shape, gradient.dtype, gradient.is_sparse


def _mark_of(parameter: torch.Tensor) -> Any:
    gradient: Any = parameter.grad
    # A sparse one is copied when it comes, and has no memory of its own to look at.
    return None if gradient.is_sparse else mark_of(gradient)


def _telling(method: Any) -> Any:
    """Returns a hook that tells whoever it is for, as long as there is one."""

    def hook(parameter: torch.Tensor) -> None:
        told = method()
        if told is not None:
            told(parameter)

    return hook
