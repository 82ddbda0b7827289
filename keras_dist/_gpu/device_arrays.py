"""Arrays in GPU memory: an address with shape and dtype, which a tensor of a framework owns."""

import collections
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist import errors
from keras_dist._gpu.cuda import Event, Runtime, load_runtime

Allocate = Callable[[tuple[int, ...], np.dtype], "DeviceArray"]
ALIGNMENT = 64  # bytes: a cache line


class Completion(Protocol):
    """The end of the work that writes an array."""

    def wait(self) -> None:
        """Blocks the host until the work has been done; raises the error of the work."""

    def hold(self, stream: int) -> None:
        """Makes later work of a stream wait for it; does not block the host."""


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """How a framework joins arrays, and views a part, by one operation; the engine copies each."""

    join: Callable[[Sequence["DeviceArray"], Sequence[int], int], "DeviceArray"]
    part: Callable[["DeviceArray", int, tuple[int, ...]], "DeviceArray"]


class DeviceArray:
    """An array in GPU memory, contiguous in row-major order, that a tensor of a framework owns."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        owner: Any,
        allocate: Allocate,
        stream: Callable[[], int] | None = None,
        joiner: Concatenation | None = None,
    ):
        self.address, self.shape, self.dtype = address, shape, dtype
        self.owner, self._allocate = owner, allocate
        self._stream, self.joiner = stream, joiner
        self.written: Event | None = None  # after the work that writes it
        self.completion: Completion | None = None  # of an operation of the engine that writes it
        self._prepared: DeviceArray | Exception | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def empty(self, shape: tuple[int, ...] | None = None) -> "DeviceArray":
        """Returns a new array of the same dtype and framework."""
        made, self._prepared = self._prepared, None
        if made is not None and shape in (None, self.shape):
            if isinstance(made, Exception):
                raise made
            return made
        return self._allocate(self.shape if shape is None else shape, self.dtype)

    def to_host(self) -> np.ndarray:
        runtime, host = _runtime(), np.empty(self.shape, self.dtype)
        pinned, stream = runtime.pinned(self.nbytes), runtime.copies
        self.hold(stream)
        runtime.copy(pinned.ctypes.data, self.address, self.nbytes, stream)
        runtime.event(stream).wait()
        host.reshape(-1).view(np.uint8)[...] = pinned
        return host

    def from_host(self, host: np.ndarray) -> "DeviceArray":
        """Returns a new array of the same framework with the values of an array on the host."""
        runtime, made = _runtime(), self.empty(host.shape)
        pinned, stream = runtime.pinned(host.nbytes), runtime.copies
        pinned[...] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        made.hold(stream)
        runtime.copy(made.address, pinned.ctypes.data, host.nbytes, stream)
        runtime.event(stream).wait()
        return made

    def hold(self, stream: int) -> None:
        """Makes later work of a stream wait until the array has been written."""
        self.mark()
        if self.written is not None:
            self.written.hold(stream)
        if self.completion is not None:
            self.completion.hold(stream)

    def mark(self) -> None:
        """Marks the place in the work of its stream after which it has been written: here."""
        # `hold` does it at the latest; then it also waits for what the framework does meanwhile.
        if self.written is None and self._stream is not None:
            self.written = _runtime().event(self._stream())

    def section(self, start: int, stop: int) -> "DeviceArray":
        """Returns elements of the flattened array, in the same memory."""
        self.mark()
        address = self.address + start * self.dtype.itemsize
        part = DeviceArray(address, (stop - start,), self.dtype, self.owner, self._allocate)
        part.written, part.completion = self.written, self.completion
        return part

    def __reduce__(self) -> Any:
        """Pickles an array on the host, for a rank that receives the result of another."""
        return np.array, (self.to_host(),)

    def __deepcopy__(self, memo: Any) -> np.ndarray:
        """Copies to the host, where no script can write to the copy."""
        return self.to_host()

    def prepare(self) -> None:
        """Allocates the next `empty` at once; that raises its error, where all ranks do."""
        try:
            self._prepared = self.empty()
            self._prepared.mark()
        except Exception as error:
            self._prepared = error

    def finish(self, stream: int | None) -> Any:
        """Returns the owner, which the framework may use once the array has been written."""
        if self.completion is not None:
            if stream is None:
                self.completion.wait()
            else:
                self.completion.hold(stream)
        return self.owner


def uniform(arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays of one kind: if some are on the host, copies of the others are as well."""
    if all(isinstance(array, DeviceArray) for array in arrays):
        return list(arrays)
    return [array.to_host() if isinstance(array, DeviceArray) else array for array in arrays]


def _runtime() -> Runtime:
    runtime = load_runtime()
    if runtime is None:
        raise errors.BackendError("[keras_dist] The runtime of the GPU is gone.")
    return runtime


class Half:
    """Pinned memory for a piece; results of two pieces are copied up at a time."""

    def __init__(self, memory: np.ndarray, arrays: Sequence[DeviceArray]):
        self.memory = memory
        self.filled: Event | None = None  # after the copies down
        self.free: Event | None = None  # after the copies up
        self.arrays = list(arrays)  # kept while they are copied

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The GPU may still copy from and to the memory, which others get next. When Python ends
        # nobody does, and what a wait needs may be gone.
        if not is_ending():
            with contextlib.suppress(Exception):  # of work that has failed
                self.wait()

    def wait(self) -> None:
        """Waits for the copies into and out of this memory, also of work that was given up."""
        for event in (self.filled, self.free):
            if event is not None:
                event.wait()

    def views(self, arrays: Sequence[DeviceArray]) -> list[np.ndarray]:
        """Returns the places of arrays in this memory, as arrays."""
        found, start = [], 0
        for array in arrays:
            flat = self.memory[start : start + array.nbytes].view(array.dtype)
            found.append(flat.reshape(array.shape))
            start += _aligned(array.nbytes)
        return found


class Staging:
    """Copies arrays down to the host and results up again, for all that a process reduces.

    Only pinned memory is used: for other memory the driver makes a second copy, and the host waits
    for it.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._rising: collections.deque[Half] = collections.deque()  # with copies up

    def down(self, arrays: Sequence[DeviceArray]) -> Half:
        """Starts to copy arrays into pinned memory; waits while two pieces are being copied up."""
        while len(self._rising) > 1:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self._rising.popleft().wait()
        nbytes = sum(_aligned(array.nbytes) for array in arrays)
        half, stream = Half(self._runtime.pinned(nbytes), arrays), self._runtime.copies
        for array, view in zip(arrays, half.views(arrays), strict=True):
            array.hold(stream)
            self._runtime.copy(view.ctypes.data, array.address, array.nbytes, stream)
        half.filled = self._runtime.event(stream)
        return half

    def host_arrays(self, half: Half) -> list[np.ndarray]:
        """Waits for the copies of `down`; returns the arrays in pinned memory."""
        if half.filled is not None:
            half.filled.wait()
        return half.views(half.arrays)

    def up(
        self,
        half: Half,
        results: Sequence[np.ndarray],
        views: Sequence[np.ndarray],
        targets: Sequence[DeviceArray],
    ) -> None:
        """Starts to copy results, by way of the memory of `down`, into new arrays on the GPU."""
        for result, view in zip(results, views, strict=True):
            if result.ctypes.data != view.ctypes.data:
                np.copyto(view, result)
        stream = self._runtime.copies
        half.arrays = list(targets)
        for view, target in zip(half.views(targets), targets, strict=True):
            target.hold(stream)
            self._runtime.copy(target.address, view.ctypes.data, target.nbytes, stream)
        half.free = self._runtime.event(stream)
        for target in targets:
            target.completion = half.free
        self._rising.append(half)


_staging_of = functools.cache(Staging)


def staging() -> Staging:
    """Returns the staging of the GPU of this process, whose memory all reductions share."""
    return _staging_of(_runtime())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
