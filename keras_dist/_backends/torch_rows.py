"""Gradients of embeddings by their rows on torch, for which Keras makes a table in each step.

`torch.nn.functional.embedding` makes a sparse gradient if asked to. The ranks reduce its rows, and
Keras gets the table that it expects, in memory where only the rows of the last step are cleared.
Whatever else is added to such a gradient, as by tied weights, makes it dense before.
"""

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keras_dist._backends import overrides
from keras_dist._compat.torch import has_hooks, weak_tensor_keys, writes_to

# A smaller table is faster reduced whole, with others; so is one of which a batch fills much.
LEAST_NBYTES = 2**20
FEW = 16  # a batch looks up at most a sixteenth as many rows as there are
OF_KERAS = ("keras.", "keras_dist.", "builtins")
BY_ROWS = "_keras_dist_by_rows"  # attribute of the patched function

_step = threading.local()


def may_be_sparse(model: Any) -> bool:
    """Returns whether gradients of a model go to the reduction as backpropagation makes them."""
    import keras

    from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER

    optimizer = model.optimizer
    # One of the user's may write to gradients in ways that torch does not count.
    if not all(each.__module__.startswith(OF_KERAS) for each in type(optimizer).__mro__):
        return False
    if model.jit_compile or isinstance(
        optimizer, (keras.optimizers.LossScaleOptimizer, MULTI_OPTIMIZER)
    ):
        return False
    is_own = any(overrides(model, name) for name in ("train_step", "compute_loss"))
    return not is_own and not optimizer.gradient_accumulation_steps


@contextlib.contextmanager
def embeddings_by_rows(model: Any) -> Iterator[None]:
    """Returns a context in which lookups in large tables of a model have gradients of rows."""
    functional, before = torch.nn.functional, _model()
    original, _step.model = functional.embedding, model
    # No step around this one has, nor one of a thread.
    patches = not (isinstance(original, types.FunctionType) and BY_ROWS in vars(original))
    if patches:
        functional.embedding = _by_rows(original)
    try:
        yield
    finally:
        _step.model = before
        if patches:
            functional.embedding = original


@functools.lru_cache(1)
def _by_rows(embedding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(embedding)
    def look_up(*args: Any, **options: Any) -> torch.Tensor:
        # A compiler, or a transformation of `torch.func`, knows no sparse gradients.
        if len(args) == 2 and not options and not torch.compiler.is_compiling():
            indices, weight = args
            model = _model()
            if model is not None and type(weight) is torch.nn.Parameter and weight.requires_grad:
                return embedding(indices, weight, sparse=_gives_rows(model, indices, weight))
        return embedding(*args, **options)

    vars(look_up)[BY_ROWS] = True
    return look_up


class TableMemory:
    """Memory for a gradient of which a step fills few rows."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._memory: np.ndarray | None = None
        self._rows: np.ndarray | None = None  # that are filled
        self._given: torch.Tensor | None = None
        self._writes = 0  # to what was given
        self._base: Any = None  # of what was given, as long as anything refers to it

    def filled(self, values: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Returns the table with these rows, in memory that nothing else refers to."""
        is_written = self._given is None or writes_to(self._given) != self._writes
        self._given = None
        memory = self._memory
        if memory is None or self._base() is not None:
            self._memory = memory = np.zeros(self._shape, values.dtype)
        elif is_written:
            memory.fill(0)
        else:
            memory[self._rows] = 0
        memory[rows] = values
        self._rows = rows
        base = np.frombuffer(memory.data, np.uint8)
        self._base = weakref.ref(base)
        self._given = torch.from_numpy(base.view(memory.dtype).reshape(memory.shape))
        self._writes = writes_to(self._given)
        return self._given


def table_of(parameter: torch.Tensor) -> TableMemory | None:
    """Returns the memory of a gradient that a train step gives as rows; `None` for others."""
    found: TableMemory | None = _tables().get(parameter)
    return found


@functools.cache
def _tables() -> Any:
    """Returns the table of each parameter, `None` if its gradients are dense."""
    return weak_tensor_keys()


def _model() -> Any:
    """Returns the model of the step of this thread; `None` outside of one."""
    return vars(_step).get("model")


def _gives_rows(model: Any, indices: torch.Tensor, weight: torch.Tensor) -> bool:
    tables = _tables()
    if weight not in tables:  # decided once: steps stay alike, so that buckets overlap
        may_give = _has_few(indices, weight) and _trains(model, weight)
        tables[weight] = TableMemory(weight.shape) if may_give else None
    return tables[weight] is not None and not has_hooks(weight)


def _trains(model: Any, weight: torch.Tensor) -> bool:
    return any(variable.value is weight for variable in model.trainable_variables)


def _has_few(indices: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        weight.is_cpu
        and weight.dtype in (torch.float32, torch.float64)
        and weight.nbytes >= LEAST_NBYTES
        and FEW * indices.numel() <= len(weight)
    )
