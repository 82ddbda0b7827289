"""`DistributedOptimizer` for torch: makes an optimizer reduce its gradients over the ranks."""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_dist import errors, runtime
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.face import wire_of
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_options import parse_passes, parse_reduction_options
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compilation import untraced
from keras_dist.torch.gradients import Gradients
from keras_dist.torch.reduce_ops import Compression, allreduce


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before each step.

    The optimizer is changed in place and returned; it keeps its class as a base, its state and its
    learning rate schedulers. Reductions overlap with `backward` if ranks have a spare core, and
    `step` waits for them. If no rank has a gradient for a parameter, its gradient remains `None`
    and the parameter is not updated. Ranks outside `process_set` step by their own gradients.

    Args:
        optimizer: any torch optimizer, with its parameters.
        named_parameters: `model.named_parameters()`: names for messages. Defaults to numbers.
        compression: a member of `Compression`, or a class with its methods. Defaults to
            `Compression.none`.
        backward_passes_per_step: number of backward passes whose gradients are accumulated before
            they are reduced. Defaults to 1.
        op: `Average`, `Sum` or `Adasum`, or its name. Defaults to `Average`.
        gradient_predivide_factor: divisor of the gradients before the sum over ranks; the average
            is the same. Defaults to 1.0.
        num_groups: deprecated, until 2.0: `groups` as a number.
        groups: gradients that are reduced together: a number of groups, or lists of parameters.
            Defaults to buckets by size.
        sparse_as_dense: whether sparse gradients are reduced as dense tensors. Defaults to `False`.
        process_set: the ranks to reduce over. Defaults to all ranks.

    Returns:
        `optimizer`, with further methods: `synchronize()` reduces the gradients before the step,
        as for clipping; `skip_synchronize()` returns a context for the step after that;
        `set_backward_passes_per_step(passes)` changes the number of passes.

    Raises:
        ArgumentTypeError: `optimizer` is not a torch optimizer, or an argument has an invalid type.
        ArgumentError: `optimizer` is distributed, names are duplicate or missing, or an argument
            has an invalid value.

    Example:
    ```python
    import torch
    import keras_dist.torch as hvd

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ```
    """
    where = runtime.where()
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _DistributedTorch):
        distributed = isinstance(optimizer, _DistributedTorch)
        error = errors.ArgumentError if distributed else errors.ArgumentTypeError
        received = "a distributed optimizer" if distributed else type(optimizer).__name__
        expected = "an optimizer of torch, not distributed"
        remedy = "Call DistributedOptimizer once, on torch's optimizer."
        raise error(errors.explain(where, expected, received, remedy))
    options = parse_reduction_options(
        op,
        process_set,
        wire_of(compression),
        backward_passes_per_step=backward_passes_per_step,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=resolve_groups(groups, num_groups),
    )
    names = _checked_names(optimizer, named_parameters, where)
    optimizer._keras_dist = Gradients(options, compression, names)
    own: Any = type(optimizer)
    optimizer.__class__ = _distributed_class(own)
    optimizer._keras_dist.watch(_parameters_of(optimizer))
    # A hook, since learning rate schedulers replace `step`.
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


class _DistributedTorch:
    """The further methods of a distributed optimizer: a mixin in front of its class."""

    _keras_dist: Gradients
    _skips = False

    @untraced
    def synchronize(self) -> None:
        """Reduces the gradients, or waits for their reduction, which `step` does otherwise.

        Collective: every rank; blocks.
        """
        self._keras_dist.reduce(_parameters_of(self))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which `step` does not reduce: call it after `synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before a reduction, from the next step on."""
        self._keras_dist.passes = parse_passes(passes, runtime.where())

    @untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the class of the optimizer does.

        The backward passes of an incomplete step are dropped.
        """
        self._keras_dist.drop_passes()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._keras_dist.watch(_parameters_of(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as the class of the optimizer does, and discards ready gradients."""
        self._keras_dist.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as the class of the optimizer does; their gradients are reduced."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._keras_dist.watch(_parameters_of(self))

    def __reduce__(self) -> Any:
        """Pickles and copies as the class of the optimizer does: the result is not distributed."""
        base: Any = type(self).__bases__[1]
        return base.__new__, (base,), base.__getstate__(self)


@untraced
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Reduces the gradients before a step, or after each call of its closure."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        others = {key: value for key, value in kwargs.items() if key != "closure"}
        return (optimizer, _with_reduction(optimizer, closure), *args[2:]), others
    gradients = optimizer._keras_dist
    if not optimizer._skips:
        if gradients.are_reduced:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() does not reduce again: call it "
                "in `with optimizer.skip_synchronize():`.",
                stacklevel=4,
            )
        else:
            gradients.reduce(_parameters_of(optimizer))
    gradients.are_reduced = False
    return None


def _with_reduction(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a closure that reduces the gradients and averages the loss."""

    @functools.wraps(closure)
    def reduced() -> Any:
        loss = closure()
        gradients = optimizer._keras_dist
        gradients.reduce(_parameters_of(optimizer))
        gradients.are_reduced = False
        if not gradients.is_shared() or loss is None:
            return loss
        with torch.no_grad():
            # Optimizers such as LBFGS decide by the loss whether to continue; the ranks must agree.
            mean = allreduce(torch.as_tensor(loss), process_set=gradients.process_set)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    return reduced


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@functools.cache
def _distributed_class(base: Any) -> Any:
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_DistributedTorch, base), {**members, "__doc__": base.__doc__})


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Any, where: str
) -> dict[int, str]:
    """Returns the name of each parameter by its `id`."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    expected = "named_parameters to be pairs of name and parameter"
    remedy = "Pass model.named_parameters()."
    wrong = next((p for p in pairs if not isinstance(p, tuple) or len(p) != 2), None)
    if wrong is not None:
        received = type(wrong).__name__
        raise errors.ArgumentTypeError(where, expected, received, remedy)
    counts = collections.Counter(name for name, _ in pairs)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        expected = "each name once in named_parameters"
        received = f"{', '.join(duplicates)} twice"
        remedy = "Add a prefix to the names of each model."
        raise errors.ArgumentError(where, expected, received, remedy)
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = [p for p in _parameters_of(optimizer) if id(p) not in names]
    if unnamed:
        expected = "a name for each parameter of the optimizer in named_parameters"
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unnamed)
        received = f"none for {len(unnamed)}, of shape {shapes}"
        remedy = "Omit named_parameters, or name all parameters."
        raise errors.ArgumentError(where, expected, received, remedy)
    return names
