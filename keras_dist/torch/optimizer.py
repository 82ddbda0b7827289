"""`DistributedOptimizer` for torch: any optimizer, whose gradients are those of all ranks."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_dist import errors, runtime
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_options import parse_passes, parse_reduction_options
from keras_dist.ops.tensor_compression import wire_of
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compressors import Compression
from keras_dist.torch.gradients import Gradients
from keras_dist.torch.reduce_ops import allreduce

__all__ = ["DistributedOptimizer"]


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

    The optimizer itself is changed and returned: it keeps its class as a base, its state and its
    learning rate schedulers. Gradients are reduced while `backward` goes on, where ranks have a
    core to spare, and `step` waits for them. A parameter that no rank has a gradient for keeps
    `None`, and stays. Ranks outside of `process_set` step by their own.

    Args:
        optimizer: any optimizer of torch, with its parameters.
        named_parameters: `model.named_parameters()`: names for messages. Defaults to numbers.
        compression: of `Compression`, or a class with its methods. Defaults to `Compression.none`.
        backward_passes_per_step: so many gradients are added up before they are reduced.
            Defaults to 1.
        op: `Average`, `Sum` or `Adasum` of the ranks' gradients. Defaults to `Average`.
        gradient_predivide_factor: an average divides by it before the sum, and by the rest after
            it. Defaults to 1.0.
        num_groups: deprecated, as `groups`.
        groups: which gradients travel together: a number of groups, or lists of parameters.
            Defaults to what their sizes suggest.
        sparse_as_dense: whether sparse gradients are reduced as dense ones. Defaults to `False`.
        process_set: the ranks that train together. Defaults to all.

    Returns:
        `optimizer`, which has besides: `synchronize()`, for the reduced gradients before the step,
        as clipping needs them; `skip_synchronize()`, a context for the step after that;
        `set_backward_passes_per_step(passes)`.

    Raises:
        ArgumentTypeError: it is no optimizer of torch, or an argument is of another kind.
        ArgumentError: it is distributed already, names occur twice or are missing, or an argument
            has a value that cannot be used.

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
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _Distributed):
        distributed = isinstance(optimizer, _Distributed)
        kind = errors.ArgumentError if distributed else errors.ArgumentTypeError
        received = "one that is distributed" if distributed else type(optimizer).__name__
        expected, remedy = "an optimizer of torch, not distributed", "Call it once, on torch's own."
        raise kind(errors.explain(where, expected, received, remedy))
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
    # A hook, as schedulers replace `step` itself.
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


class _Distributed:
    """The methods that a distributed optimizer has besides. Comes before the user's class."""

    _keras_dist: Gradients
    _skips = False

    def synchronize(self) -> None:
        """Waits until the gradients are those of all ranks; `step` does it otherwise.

        Collective: every rank; blocks.
        """
        self._keras_dist.reduce(_parameters_of(self))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which `step` takes the gradients as `synchronize` has left them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many gradients are added up before they are reduced, from the next step on.

        Args:
            passes: 1 or more.
        """
        self._keras_dist.passes = parse_passes(passes, runtime.where())

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the user's class does.

        Raises:
            UsageError: they are just being reduced.
        """
        self._keras_dist.check_idle()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._keras_dist.watch(_parameters_of(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state, as the user's class does; gradients that have come count no more."""
        self._keras_dist.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as the user's class does; their gradients are reduced as well."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._keras_dist.watch(_parameters_of(self))

    def __reduce__(self) -> Any:
        """Pickles, and copies, what the user's class would: one that is not distributed."""
        base: Any = type(self).__bases__[1]
        return base.__new__, (base,), base.__getstate__(self)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Has the gradients reduced: before the step, or each time its closure has made new ones."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        others = {key: value for key, value in kwargs.items() if key != "closure"}
        return (optimizer, _reducing(optimizer, closure), *args[2:]), others
    gradients = optimizer._keras_dist
    if not optimizer._skips:
        if gradients.are_reduced:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() reduces nothing again: put it "
                "under `with optimizer.skip_synchronize():`.",
                stacklevel=4,
            )
        else:
            gradients.reduce(_parameters_of(optimizer))
    gradients.are_reduced = False
    return None


def _reducing(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a closure after which the gradients are those of all ranks, and the loss too.

    Optimizers such as LBFGS decide by the loss whether to go on: the ranks must decide alike.
    """

    @functools.wraps(closure)
    def reduced() -> Any:
        loss = closure()
        gradients = optimizer._keras_dist
        gradients.reduce(_parameters_of(optimizer))
        gradients.are_reduced = False
        if not gradients.is_shared() or loss is None:
            return loss
        with torch.no_grad():
            mean = allreduce(torch.as_tensor(loss), process_set=gradients.process_set)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    return reduced


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@functools.cache
def _distributed_class(base: Any) -> Any:
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_Distributed, base), {**members, "__doc__": base.__doc__})


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Any, where: str
) -> dict[int, str]:
    """Returns the name of each parameter by its id.

    Raises:
        ArgumentTypeError: there is something else than pairs.
        ArgumentError: a name occurs twice, or a parameter has none.
    """
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    expected = "named_parameters to be pairs of name and parameter"
    remedy = "Pass model.named_parameters()."
    wrong = next((p for p in pairs if not isinstance(p, tuple) or len(p) != 2), None)
    if wrong is not None:
        received = type(wrong).__name__
        raise errors.ArgumentTypeError(errors.explain(where, expected, received, remedy))
    known = [name for name, _ in pairs]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice:
        expected, received = "each name once in named_parameters", f"{', '.join(twice)} twice"
        remedy = "Parameters of several models need prefixes."
        raise errors.ArgumentError(errors.explain(where, expected, received, remedy))
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = [p for p in _parameters_of(optimizer) if id(p) not in names]
    if unnamed:
        expected = "a name for each parameter of the optimizer in named_parameters"
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unnamed)
        received = f"none for {len(unnamed)}, of shape {shapes}"
        remedy = "Leave named_parameters out, or name them all."
        raise errors.ArgumentError(errors.explain(where, expected, received, remedy))
    return names
