"""Arrays in GPU memory: an address with shape and dtype, which a tensor of a framework owns."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist import errors
from keras_dist._gpu.runtime import Event, Runtime, load_runtime

Allocate = Callable[[tuple[int, ...], np.dtype], "DeviceArray"]


class Completion(Protocol):
    """The end of the work that writes an array."""

    def wait(self) -> None:
        """Blocks the host until the work has been done; raises the error of the work."""

    def hold(self, stream: int) -> None:
        """Makes later work of a stream wait for it; does not block the host."""


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """How a framework joins arrays: by one operation, where the engine would copy each array.

    Args:
        part: returns the view of a shape at an offset of a flat array.
    """

    join: Callable[[Sequence["DeviceArray"], Sequence[int], int], "DeviceArray"]
    part: Callable[["DeviceArray", int, tuple[int, ...]], "DeviceArray"]


class DeviceArray:
    """An array in GPU memory, contiguous in row-major order.

    Args:
        shape: its shape.
        owner: the tensor of a framework whose memory it is.
        allocate: returns a new array of a shape and dtype, owned by such a tensor.

    Attributes:
        written: an event after the work that writes it; `None` if there is none yet.
        completion: the end of an operation of the engine that writes it; `None` if there is none.
    """

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
        self.written: Event | None = None
        self.completion: Completion | None = None
        self._prepared: DeviceArray | Exception | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def empty(self, shape: tuple[int, ...] | None = None) -> "DeviceArray":
        """Returns a new array of the same dtype and framework.

        Args:
            shape: its shape. Defaults to that of this array.
        """
        made, self._prepared = self._prepared, None
        if made is not None and shape in (None, self.shape):
            if isinstance(made, Exception):
                raise made
            return made
        return self._allocate(self.shape if shape is None else shape, self.dtype)

    def to_host(self) -> np.ndarray:
        """Returns a copy on the host."""
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
        """Marks the place in the work of its stream after which it has been written: here.

        `hold` does it at the latest; then it also waits for what the framework does meanwhile.
        """
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
        """Allocates the next `empty` of the same shape at once; an error is raised there.

        The engine calls `empty` where an error of one rank is raised on all.
        """
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
