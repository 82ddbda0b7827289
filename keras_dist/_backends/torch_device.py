"""Torch tensors as arrays for the engine: in place, on the host or in GPU memory."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_dist._backends.torch_tensors import dtype_of, to_numpy, to_torch, write_all
from keras_dist._gpu import Concatenation, DeviceArray, counts_host_memory, load_runtime, uniform


def gpu_number() -> int | None:
    """Returns the number of the current GPU. See `Backend.gpu_number`."""
    if counts_host_memory():
        return 0
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether the engine takes a tensor as an array in GPU memory."""
    if tensor.is_cuda:
        runtime = load_runtime()
        return runtime is not None and runtime.device == tensor.device.index
    return tensor.is_cpu and counts_host_memory()


def to_array(tensor: torch.Tensor) -> np.ndarray | DeviceArray:
    """Returns a tensor as an array of the engine; only one that is not contiguous is copied."""
    if not is_on_device(tensor):
        return to_numpy(tensor)
    if tensor.layout is not torch.strided:
        return to_numpy(tensor)  # which refuses it
    return _device_array(tensor.detach().contiguous().resolve_conj().resolve_neg())


def to_tensor(array: np.ndarray | DeviceArray, like: torch.Tensor) -> torch.Tensor:
    """Returns an array of the engine as a tensor of the dtype and device of `like`.

    Later work of the current stream waits until the array has been written.
    """
    if not isinstance(array, DeviceArray):
        return to_torch(array, like)
    tensor: torch.Tensor = array.finish(_stream_of(like))
    return tensor


def to_tensors(arrays: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns arrays as `to_tensor` does; the stream waits once for what one operation writes."""
    held: set[int] = set()
    found = []
    for array, like in zip(arrays, likes, strict=True):
        if isinstance(array, DeviceArray) and id(array.completion) in held:
            found.append(array.owner)
            continue
        if isinstance(array, DeviceArray):
            held.add(id(array.completion))
        found.append(to_tensor(array, like))
    return found


def reduce_on_device(reduce_slices: Any, sparse: torch.Tensor) -> torch.Tensor:
    """Reduces a coalesced sparse tensor in GPU memory; see `Backend.reduce_gradients`."""
    shape = sparse.shape[: sparse.sparse_dim()]
    indices, values = sparse.indices(), sparse.values()
    flat = indices[0]
    for index, length in zip(indices[1:], shape[1:], strict=True):
        flat = flat * length + index
    rows, numbers, count = reduce_slices(to_array(values), to_array(flat))
    full = torch.stack(torch.unravel_index(to_tensor(numbers, flat), shape))
    total = torch.sparse_coo_tensor(full, to_tensor(rows, values), sparse.shape).coalesce()
    return total / count if count > 1 else total


def _device_array(tensor: torch.Tensor) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        return _device_array(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))

    return DeviceArray(
        tensor.data_ptr(),
        tuple(tensor.shape),
        dtype_of(tensor),
        tensor,
        allocate,
        lambda: _stream_of(tensor),
        joiner=_JOINER,
    )


def _join(arrays: Sequence[DeviceArray], offsets: Sequence[int], count: int) -> DeviceArray:
    tensors = [array.owner for array in arrays]
    flat = torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
    places = [_place(flat, at, t.shape) for at, t in zip(offsets, tensors, strict=True)]
    write_all(places, tensors)
    return _device_array(flat)


def _part(flat: DeviceArray, offset: int, shape: tuple[int, ...]) -> DeviceArray:
    return _device_array(_place(flat.owner, offset, shape))


def _place(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    return flat.narrow(0, offset, math.prod(shape)).view(shape)


_JOINER = Concatenation(_join, _part)


def _stream_of(tensor: torch.Tensor) -> Any:
    """Returns the current stream; 0, the program itself, for a tensor on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def engine_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors as arrays of the engine. See `Backend.engine_arrays`."""
    return uniform([to_array(tensor) for tensor in tensors])


def tensor_of(array: Any, like: Any) -> Any:
    """Returns an array of the engine as a tensor. See `Backend.tensor_of`."""
    return to_tensor(array, like)
