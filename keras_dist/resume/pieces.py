"""The pieces of a checkpoint: which rank writes which elements of which variable.

A rank writes its slices of sharded state. State that is equal on all ranks is dealt by bytes, in
equal ranges. The root writes what differs from rank to rank. Does not communicate.
"""

import dataclasses
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.resume.tensor_file import Tensor
from keras_dist.training.model_state import host_array, slice_of
from keras_dist.training.sharded_state import whole_value


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of the flattened value of a variable."""

    index: int
    variable: Any
    low: int
    high: int


def pieces_of_rank(
    variables: Sequence[Any], rank: int, size: int, equal: Collection[int], is_root: bool
) -> list[Piece]:
    """Returns the pieces that a rank writes; `equal` has the ids of what all ranks have alike."""
    dealt = [variable for variable in variables if slice_of(variable) is None]
    dealt = [variable for variable in dealt if id(variable) in equal]
    total = sum(nbytes_of(variable) for variable in dealt)
    low, high = total * rank // size, total * (rank + 1) // size
    known, offset = {id(variable) for variable in dealt}, 0
    found = []
    for index, variable in enumerate(variables):
        count = _count_of(variable)
        if (sliced := slice_of(variable)) is not None:
            part = sliced[0].parts[sliced[1]]
            bounds = part.start, part.stop
        elif id(variable) in known:
            itemsize = dtype_of(variable).itemsize
            begin, end = ((bound - offset) // itemsize for bound in (low, high))
            bounds = min(max(begin, 0), count), min(max(end, 0), count)
            offset += count * itemsize
        else:
            bounds = (0, count) if is_root else (0, 0)
        if bounds[0] < bounds[1]:
            found.append(Piece(index, variable, *bounds))
    return found


def whole_tensors(variables: Iterable[Any]) -> list[Tensor]:
    """Returns the whole values of variables; of slices, in the context `gathered`."""
    return [
        Tensor(f"{index}:0", dtype_of(variable).name, _bytes_of(whole_value(variable)).data)
        for index, variable in enumerate(variables)
    ]


def nbytes_of(variable: Any) -> int:
    """Returns the size in bytes of a variable on this rank."""
    return _count_of(variable) * dtype_of(variable).itemsize


def dtype_of(variable: Any) -> np.dtype:
    """Returns the dtype of a variable."""
    return np.dtype(keras.backend.standardize_dtype(variable.dtype))


class Stage:
    """Memory of copies, used again for each checkpoint: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._copies: list[np.ndarray] = []
        self._making = threading.Thread()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Makes room for pieces, in a thread, before the first copy needs it."""
        sizes = [(each.high - each.low) * dtype_of(each.variable).itemsize for each in pieces]
        self._making = threading.Thread(target=self._make, args=(sizes,), daemon=True)
        self._making.start()

    def _make(self, sizes: list[int]) -> None:
        # Filled, so that the system provides the memory now.
        self._copies = [np.full(nbytes, 0, np.uint8) for nbytes in sizes]

    def tensors(self, pieces: Sequence[Piece], copies: bool) -> list[Tensor]:
        """Returns what a file holds of pieces."""
        values = [_value_of(piece) for piece in pieces]
        if copies:
            if self._making.is_alive():
                self._making.join()
            sizes = [each.nbytes for each in values]
            if sizes != [each.nbytes for each in self._copies]:
                self._make(sizes)
            for copy, value in zip(self._copies, values, strict=True):
                np.copyto(copy, value)
            values = self._copies
        return [
            Tensor(f"{piece.index}:{piece.low}", dtype_of(piece.variable).name, value.data)
            for piece, value in zip(pieces, values, strict=True)
        ]

    def release(self) -> None:
        """Frees the memory."""
        self._copies = []


def _value_of(piece: Piece) -> np.ndarray:
    """Returns the bytes of a piece."""
    found = _bytes_of(host_array(piece.variable))
    if slice_of(piece.variable) is not None:
        return found
    itemsize = dtype_of(piece.variable).itemsize
    return found[piece.low * itemsize : piece.high * itemsize]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _count_of(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))
