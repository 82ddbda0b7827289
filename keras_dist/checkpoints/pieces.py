"""The pieces of a checkpoint: which rank writes which elements of which variable.

A rank writes its slices of sharded state. State that is equal on all ranks is dealt by bytes, in
equal ranges. The root writes what differs from rank to rank. Does not communicate.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.storage.tensor_file import Tensor
from keras_dist.training.model_state import host_array, slice_of

SEED = "seed"  # prefix of the names of random states; other names are those of pieces


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of the flattened value of a variable."""

    index: int
    variable: Any
    low: int
    high: int

    @property
    def name(self) -> str:
        """Name of the piece in the file of its rank."""
        return f"{self.index}:{self.low}"


def pieces_of_rank(
    variables: Sequence[Any], rank: int, size: int, is_equal: Callable[[Any], bool], is_root: bool
) -> list[Piece]:
    """Returns the pieces that a rank writes."""
    dealt = [variable for variable in variables if slice_of(variable) is None]
    dealt = [variable for variable in dealt if is_equal(variable)]
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


def views_of(pieces: Iterable[Piece]) -> list[np.ndarray]:
    """Returns the bytes of pieces as flat uint8 arrays, see `host_array`."""
    return [_view(piece).view(np.uint8) for piece in pieces]


def tensors_of(pieces: Iterable[Piece], arrays: Iterable[np.ndarray]) -> list[Tensor]:
    """Returns what a file holds of pieces."""
    return [
        Tensor(piece.name, dtype_of(piece.variable).name, array.data)
        for piece, array in zip(pieces, arrays, strict=True)
    ]


def nbytes_of(variable: Any) -> int:
    """Returns the size in bytes of a variable on this rank."""
    return _count_of(variable) * dtype_of(variable).itemsize


def dtype_of(variable: Any) -> np.dtype:
    """Returns the dtype of a variable."""
    return np.dtype(keras.backend.standardize_dtype(variable.dtype))


def _view(piece: Piece) -> np.ndarray:
    whole = np.ascontiguousarray(host_array(piece.variable)).reshape(-1)
    return whole if slice_of(piece.variable) is not None else whole[piece.low : piece.high]


def _count_of(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))
