"""Broadcast of the state of models and optimizers, and collectives on Python objects."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keras_dist import errors, ops, runtime
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compilation import untraced, untraced_face
from keras_dist.torch.exchange_ops import broadcast_all


@untraced
@raises_on_all
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcasts the parameters and buffers of the root rank, in place.

    Collective: every rank; names, shapes, dtypes and `root_rank` must agree; blocks.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`.
        root_rank: rank in the job that sends its values.
        process_set: as in `allreduce`.

    Raises:
        ArgumentTypeError: `params` is another object.
        MismatchError: the arguments of the ranks differ; raised on every rank.
    """
    if isinstance(params, Mapping):
        params = params.items()
    pairs = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise errors.ArgumentTypeError(
            runtime.where(),
            "params to be model.state_dict() or model.named_parameters()",
            type(params).__name__,
            "Pass one of them: model.parameters() has no names.",
        )
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    names = ", ".join(name for name, _ in tensors)
    broadcast_all([tensor for _, tensor in tensors], root_rank, names, process_set)


@untraced
@raises_on_all
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcasts the optimizer state of the root rank: buffers, step counts, learning rates.

    Collective: every rank; the optimizers must have the same parameters; blocks. The states may
    differ, or be empty, on ranks other than the root.

    Args:
        optimizer: any torch optimizer, distributed or not.
        root_rank: rank in the job that sends its state.
        model: accepted for scripts of Horovod; has no effect.
        process_set: as in `allreduce`.

    Raises:
        ArgumentError: `optimizer` is an `LBFGS`, whose state depends on the gradients of its rank.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        expected = "an optimizer whose state does not depend on the gradients of its rank"
        remedy = "Create a new LBFGS on all ranks."
        raise errors.ArgumentError(runtime.where(), expected, "LBFGS", remedy)
    state = optimizer.state_dict()
    tensors = list(_tensors_in(state))
    own = _map(state, lambda leaf: _Placeholder() if isinstance(leaf, torch.Tensor) else leaf)
    skeleton, specs = broadcast_object(
        (own, [(tensor.shape, tensor.dtype) for tensor in tensors]),
        root_rank,
        process_set=process_set,
    )
    is_root = runtime.rank() == root_rank
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
    broadcast_all(tensors, root_rank, "optimizer state", process_set)
    if not is_root:
        found = iter(tensors)
        optimizer.load_state_dict(
            _map(skeleton, lambda leaf: next(found) if isinstance(leaf, _Placeholder) else leaf)
        )


@untraced_face(ops.broadcast_object)
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """See `keras_dist.broadcast_object`."""
    return ops.broadcast_object(obj, root_rank, name, process_set)


@untraced_face(ops.allgather_object)
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """See `keras_dist.allgather_object`."""
    return ops.allgather_object(obj, name, process_set)


@described_by(ops.join)
def join(device: int = -1) -> int:
    """See `keras_dist.join`."""
    return ops.join()


class _Placeholder:
    """Replaces a tensor in a pickled state."""


def _tensors_in(state: Any) -> Iterable[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors_in(value)


def _map(state: Any, function: Any) -> Any:
    """Returns a tree of dicts, lists and tuples with a function applied to its leaves, in order."""
    if isinstance(state, dict):
        return {key: _map(value, function) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_map(value, function) for value in state)
    return function(state)
