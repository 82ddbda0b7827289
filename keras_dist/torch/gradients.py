"""The reduction of the gradients of torch parameters, overlapped with the backward pass.

A hook on every parameter counts its backward passes. In the first step all gradients are reduced at
the end, since the parameters that have gradients, and their dtypes, are unknown before.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import _engine, errors, runtime
from keras_dist._backends import torch_overlap
from keras_dist._backends.torch_overlap import ReadyGradients
from keras_dist._backends.torch_tensors import (
    dtype_of,
    form_of,
    to_array,
    to_tensor,
    to_tensors,
    to_torch,
    write_all,
    zeros_of,
)
from keras_dist._compat.torch import weak_tensor_keys
from keras_dist._gpu import uniform
from keras_dist.ops.face import compressed, decompressed, is_custom
from keras_dist.ops.gradient_plans import SAME_MODEL, GradientPlans
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.torch import reduce_ops
from keras_dist.torch.compilation import untraced

FREEZE = "While a generator trains, freeze its discriminator by requires_grad_(False)."


class Layout:
    """The indices of gradients in a plan."""

    def __init__(
        self,
        plan: _engine.FusedAllreduce,
        parameters: Sequence[torch.Tensor],
        brought: _engine.GradientSet,
    ):
        self.plan, self.brought = plan, brought
        self._specs = [_spec(parameter) for parameter in parameters]
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether the gradients of parameters are those of the plan."""
        return self._specs == [_spec(parameter) for parameter in parameters]

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """Returns the index of a gradient; `None` if it is new or its shape or dtype differs."""
        index = self._indices.get(id(parameter))
        return index if index is None or self._specs[index] == _spec(parameter) else None


def _spec(parameter: torch.Tensor) -> Any:
    gradient: Any = parameter.grad
    return id(parameter), gradient.shape, gradient.dtype, gradient.is_sparse


def version_of(parameter: torch.Tensor) -> Any:
    """Returns a value that changes if the gradient of a parameter is replaced or written to."""
    gradient: Any = parameter.grad
    # A sparse gradient is copied when it is ready, so later writes do not matter.
    return None if gradient.is_sparse else torch_overlap.version_of(gradient)


class Gradients:
    """The gradients of an optimizer."""

    def __init__(self, options: ReductionOptions, compression: Any, names: dict[int, str]):
        self.passes = options.passes
        self.are_reduced = False  # since the last backward pass
        self._options = options
        self._compression = compression
        self._names = names
        self._plans = GradientPlans(options)
        self._watched = weak_tensor_keys()  # the number of each parameter
        self._numbers = itertools.count()  # none is given twice: parameters may be gone
        self._counts: dict[int, int] = {}  # by number: backward passes since the last step
        self._layout: Layout | None = None  # of the last step
        self._forms = weak_tensor_keys()  # of the gradients of the last step, on any rank
        self._ready: ReadyGradients | None = None
        self._versions: dict[int, Any] = {}  # by index: of gradients that have been queued
        self._contexts: dict[int, Any] = {}

    @property
    def process_set(self) -> Any:
        return self._options.process_set

    def is_shared(self) -> bool:
        """Returns whether the process set includes this rank and another rank."""
        return runtime.includes_me(self.process_set) and self._options.ranks().size > 1

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = next(self._numbers)
                hook = _hook_of(weakref.WeakMethod(self._add))
                parameter.register_post_accumulate_grad_hook(hook)

    def drop_passes(self) -> None:
        """Drops the backward passes of an incomplete step."""
        if any(count >= self.passes for count in self._counts.values()) and self.is_shared():
            raise errors.UsageError(
                runtime.where(),
                "zero_grad before backward, or after step or synchronize",
                "zero_grad between them, during the reduction of gradients",
                "Call optimizer.step() or optimizer.synchronize() first. With a GradScaler, "
                "call synchronize() before unscale_ and step, or one rank may skip a step. "
                f"{FREEZE}",
            )
        self._counts.clear()

    def reset(self) -> None:
        """Discards the gradients that are ready, after their reductions in progress, and errors."""
        self._discard_ready()
        self._plans.feedback.errors.clear()
        self._clear()
        self.are_reduced = False

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reduces the gradients, or waits for their reductions in progress. Collective; blocks."""
        # A parameter without a gradient on this rank contributes zeros if another rank has one, or
        # had one in the last step. If no rank has a gradient, it remains `None`, so that weight
        # decay and momentum do not apply.
        self.watch(parameters)
        self.are_reduced = True
        if not self.is_shared():
            self._clear()
            return
        every = parameters[::-1]
        has = {id(parameter) for parameter in every if parameter.grad is not None}
        numbered = [self._names.get(id(p), f"parameter {n}") for n, p in enumerate(parameters)]
        names = tuple(reversed(numbered))
        own = tuple(self._form_of(p) if id(p) in has else None for p in every)
        forms = tuple(form or self._forms.get(p) for form, p in zip(own, every, strict=True))
        try:
            while True:
                brought = _engine.GradientSet(names, names, forms, adapts=True)
                try:
                    trained = _completed(every, forms, has, self._options.dense)
                    self._reduce(trained, has, brought)
                    break
                except _engine.UnlikeGradients:
                    self._discard_ready()
                    mine = _engine.GradientSet(names, names, own, adapts=True)
                    compare = _engine.collectives.compare_gradients
                    forms = compare(self._options.ranks(), mine, SAME_MODEL)
        finally:
            self._clear()

    def _reduce(
        self, trained: Sequence[torch.Tensor], own: set[int], brought: _engine.GradientSet
    ) -> None:
        """Reduces gradients, together with flags for those that this rank has."""
        flags = [id(parameter) in own for parameter in trained]
        sparse = [p for p in trained if p.grad.is_sparse and not self._options.dense]
        ids = {id(parameter) for parameter in sparse}
        dense = [parameter for parameter in trained if id(parameter) not in ids]
        likes = map(self._like, reversed(dense))
        # The dtype of the last floating-point gradient: it needs no further bucket.
        like = next((like for like in likes if like.is_floating_point()), torch.empty(0))
        has = np.array(flags, dtype_of(like))
        layout, mine = self._layout, _flags(dense, has, like)
        if layout is not None and layout.brought != brought:
            layout = None
        ready, has_changed = self._ready, False
        if layout is not None and ready is not None:
            has_changed = not self._are_unchanged(layout, dense)
            if has_changed and ready.has_begun:
                # On other ranks they may not have changed: all must reduce again.
                layout.plan.reduce_again()
        if ready is None or layout is None or has_changed:
            self._discard_ready()
            layout = self._layout = self._make_layout(dense, has, brought)
            gradients = [self._contribution(parameter) for parameter in dense]
            results = layout.plan(uniform([*gradients, to_array(mine)]))
        else:
            for index, parameter in enumerate(dense):
                if index not in self._versions:
                    ready.add(index, self._contribution(parameter))
            ready.add(len(dense), to_array(mine))
            results = ready.results()
        counts = to_tensor(results.pop(), mine)
        # To read them, the host waits for the GPU.
        anywhere: list[bool] = flags if all(flags) else (counts != 0).tolist()
        self._assign(dense, results)
        for parameter in sparse:
            parameter.grad = reduce_ops.sparse_allreduce(
                parameter.grad, op=self._options.op, process_set=self.process_set
            )
        for parameter, is_anywhere in zip(trained, anywhere, strict=True):
            # The next step expects what this one has had.
            self._forms[parameter] = self._form_of(parameter) if is_anywhere else None
            if not is_anywhere:
                parameter.grad = None

    def _form_of(self, parameter: torch.Tensor) -> _engine.Form:
        dtype, index_dtype = form_of(parameter.grad)
        return dtype, None if self._options.dense else index_dtype

    def _add(self, parameter: torch.Tensor) -> None:
        self.are_reduced = False
        number = self._watched[parameter]
        count = self._counts[number] = self._counts.get(number, 0) + 1
        if count < self.passes or not self.is_shared():
            return
        if count > self.passes:
            self._discard_ready()
            self._clear()
            raise errors.UsageError(
                runtime.where(),
                f"{self._name(parameter)} {self.passes} times for each step",
                f"{count} times, before step or synchronize",
                "Pass backward_passes_per_step to accumulate as many gradients before a step. "
                "Call optimizer.step() to use the passes of an incomplete step, such as the "
                f"last one of an epoch, or optimizer.zero_grad() to drop them. {FREEZE}",
            )
        layout = self._layout
        if layout is None or not layout.plan.overlaps:
            return
        index = layout.index_of(parameter)
        if index is not None and layout.plan.comm is self._options.ranks():
            self._ready = self._ready or ReadyGradients(layout.plan)
            self._versions[index] = version_of(parameter)
            self._ready.add(index, self._contribution(parameter))

    def _are_unchanged(self, layout: Layout, dense: Sequence[torch.Tensor]) -> bool:
        """Returns whether the queued gradients have not been written to."""
        return layout.is_of(dense) and all(
            version == version_of(dense[index]) for index, version in self._versions.items()
        )

    def _make_layout(
        self, dense: Sequence[torch.Tensor], has: np.ndarray, brought: _engine.GradientSet
    ) -> Layout:
        specs = [
            *((tuple(p.grad.shape), dtype_of(self._like(p))) for p in dense),
            (has.shape, has.dtype),
        ]
        names = [*(self._name(parameter) for parameter in dense), "flags of existing gradients"]
        groups = self._options.grouped(dense)
        keys = [*map(id, dense), None]
        plan = self._plans(self._options.ranks(), names, specs, groups, keys, brought)
        return Layout(plan, dense, brought)

    def _contribution(self, parameter: torch.Tensor) -> Any:
        gradient: Any = parameter.grad
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        [tensor], self._contexts[id(parameter)] = compressed(self._compression, [dense])
        return to_array(tensor)

    def _assign(self, parameters: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
        """Copies results, whose memory is leased, into the gradients."""
        plain, arrays = [], []
        for parameter, array in zip(parameters, results, strict=True):
            gradient: Any = parameter.grad
            contexts = self._contexts.pop(id(parameter))
            if not gradient.is_sparse and not is_custom(self._compression):
                plain.append(gradient)
                arrays.append(array)
                continue
            [like], _ = compressed(self._compression, [torch.empty(0, dtype=gradient.dtype)])
            [result] = decompressed(self._compression, [to_tensor(array, like)], contexts)
            result = result.to(gradient.device)
            if gradient.is_sparse:
                parameter.grad = result.to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(result)
        write_all(plain, to_tensors(arrays, plain))

    def _like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor of the dtype of the compressed gradient."""
        gradient: Any = parameter.grad
        like: torch.Tensor
        [like], _ = compressed(self._compression, [torch.empty(0, dtype=gradient.dtype)])
        return like

    def _name(self, parameter: torch.Tensor) -> str:
        number = self._watched.get(parameter)
        return f"the gradient of {self._names.get(id(parameter), f'parameter {number}')}"

    def _discard_ready(self) -> None:
        """Waits for the reductions in progress and ignores their results."""
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def _clear(self) -> None:
        self._ready = None
        self._versions.clear()
        self._counts.clear()


def _completed(
    parameters: Sequence[torch.Tensor],
    forms: Sequence[_engine.Form | None],
    own: set[int],
    keeps_rows: bool,
) -> list[torch.Tensor]:
    """Gives parameters gradients of certain forms."""
    for parameter, form in zip(parameters, forms, strict=True):
        gradient: Any = parameter.grad
        if id(parameter) not in own:
            parameter.grad = None if form is None else zeros_of(parameter, form)
        elif gradient.is_sparse and not keeps_rows and form is not None and form[1] is None:
            parameter.grad = gradient.to_dense()
    return [parameter for parameter in parameters if parameter.grad is not None]


def _flags(dense: Sequence[torch.Tensor], has: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    device = dense[0].device if dense else None
    if has.all():  # a copy from the host would wait for the GPU
        return torch.ones(len(has), dtype=like.dtype, device=device)
    return to_torch(has, like).to(device=device)


def _hook_of(method: Any) -> Any:

    @untraced
    def hook(parameter: torch.Tensor) -> None:
        alive = method()
        if alive is not None:
            alive(parameter)

    return hook
