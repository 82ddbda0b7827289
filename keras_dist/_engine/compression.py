"""Wire formats of numbers between nodes, and the names of all compressions. Independent of MPI."""

from typing import Any

import numpy as np

from keras_dist import config, errors
from keras_dist._engine.gradient_compression import (
    METHODS,
    GradientCompression,
    Int4,
    Int8,
    PowerSGD,
    TopK,
    gradient_compression_of,
)


class Compressor:
    """The base of a compression of one's own: arrays to fewer bits and back.

    Both methods work element by element, because arrays are cut anywhere, and must not change their
    argument. The compressed dtype depends only on the dtype of the argument. No value raises an
    error: a value that a narrow dtype cannot represent becomes infinite.

    Example:
    ```python
    class Half(keras_dist.Compressor):
        \"\"\"float16, for values that would be lost at its lower end.\"\"\"

        def __init__(self, factor=1024.0):
            self.factor = factor

        def compress(self, array):
            return (array * self.factor).astype("float16")

        def decompress(self, array, dtype):
            return array.astype(dtype) / self.factor

    total = keras_dist.allreduce(gradient, compression=Half())
    ```
    """

    @property
    def name(self) -> str:
        """Name that the ranks compare: compressors of equal name must give equal results.

        Defaults to the class and the attributes of the instance, such as `Half(factor=1024.0)`.
        """
        fields = ", ".join(f"{field}={value!r}" for field, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"

    def compress(self, array: np.ndarray) -> np.ndarray:
        """Returns the array to send, of the same shape and another numeric dtype.

        Args:
            array: array of float32 or float64.
        """
        raise NotImplementedError

    def decompress(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the array to sum.

        Args:
            array: a result of `compress`, or a part of several results.
            dtype: dtype of the result: that of the array before `compress`.
        """
        raise NotImplementedError


class _Uncompressed(Compressor):
    name = "none"

    def compress(self, array: np.ndarray) -> np.ndarray:
        return array

    def decompress(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return array.astype(dtype, copy=False)


class _Float16(_Uncompressed):
    name = "fp16"

    def compress(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16)


class _BFloat16(_Uncompressed):
    name = "bf16"

    def compress(self, array: np.ndarray) -> np.ndarray:
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)


class Compression:
    """Compressions of float32 and float64, for slow links.

    Wire formats between nodes, for any reduction; nothing is compressed within a node: `none` sends
    numbers uncompressed. `fp16` sends float16: 11 significant bits, infinite from 65520 on. `bf16`
    sends bfloat16: 8 significant bits, the range of float32. Derive from `Compressor` for others.

    Compressions with error feedback, for the gradients of an optimizer, or the differences of
    weights after local steps: `powersgd`, `topk`, `int8` and `int4`. `int8` and `int4` send
    integers of 8 and 4 bits, with a scale for each 256 numbers; each rank sends its own to each
    node. What a rank has rounded off is added to its next gradient. Gradients of fewer than 1024
    elements, of rows of embeddings and of narrow floats are sent whole.
    """

    none: Compressor = _Uncompressed()
    fp16: Compressor = _Float16()
    bf16: Compressor = _BFloat16()
    int8: GradientCompression = Int8()
    int4: GradientCompression = Int4()

    @staticmethod
    def powersgd(
        rank: int = 4, *, start_step: int = 0, min_compression_rate: float = 2.0
    ) -> GradientCompression:
        """Returns a compression that sends gradients as products of two narrow matrices.

        Each gradient is a matrix: its dimensions are divided where the sides are most alike. Each
        step makes one step of a power iteration, which begins with the result of the step before.
        What a rank has not sent is added to its next gradient. Other gradients, such as those of
        biases, of rows of embeddings and of narrow floats, are sent whole.

        Args:
            rank: number of columns of the narrow matrices: a larger one costs more bytes, and the
                approximation is better. Defaults to 4.
            start_step: number of updates whose gradients are sent whole, while they change fast.
                Defaults to 0.
            min_compression_rate: least ratio of the elements of a gradient to those sent; a
                gradient with a lower one is sent whole. Defaults to 2.0.

        Returns:
            A value for `compression` of the distributed optimizers and of
            `DistributedGradientTape`.

        Raises:
            ArgumentTypeError: an argument is not a number.
            ArgumentError: an argument is out of range.

        Example:
        ```python
        compression = keras_dist.Compression.powersgd(rank=2)
        optimizer = keras_dist.DistributedOptimizer(
            keras.optimizers.SGD(0.01), compression=compression
        )
        ```
        """
        return PowerSGD(start_step, rank, min_compression_rate)

    @staticmethod
    def topk(ratio: float = 0.01, *, start_step: int = 0) -> GradientCompression:
        """Returns a compression that sends the elements of largest magnitude of each gradient.

        They are sent with their places. What a rank has not sent is added to its next gradient.
        Gradients of fewer than 1024 elements, of rows of embeddings and of narrow floats are sent
        whole.

        Args:
            ratio: share of the elements of a gradient that each rank sends, above 0 and at most 1.
                Defaults to 0.01.
            start_step: as for `powersgd`. Defaults to 0.

        Returns:
            A value for `compression`, as `powersgd`.

        Raises:
            ArgumentTypeError: an argument is not a number.
            ArgumentError: an argument is out of range.

        Example:
        ```python
        compression = keras_dist.Compression.topk(ratio=0.05, start_step=100)
        optimizer = keras_dist.DistributedOptimizer(
            keras.optimizers.SGD(0.01), compression=compression
        )
        ```
        """
        return TopK(start_step, ratio)


def parse_gradient_compression(compression: Any, where: str) -> Compressor | GradientCompression:
    """Returns the compression of gradients of a user's argument."""
    found = compression
    if isinstance(compression, str):
        found = gradient_compression_of(compression)
    if isinstance(found, GradientCompression):
        return found
    is_text = isinstance(compression, str)
    text = compression.strip().lower() if is_text else getattr(compression, "__name__", "")
    method = next((name for name in METHODS if text.startswith(name)), None)
    if method is not None:
        kind = errors.ArgumentError if is_text else errors.ArgumentTypeError
        call = "()" if callable(getattr(Compression, method)) else ""
        raise kind(
            where,
            f"compression to be {method} with its options by their names",
            repr(compression),
            f"Pass keras_dist.Compression.{method}{call}, or a text as {METHODS[method]().name!r}.",
        )
    return parse_compression(compression, where)


def parse_compression(compression: Any, where: str) -> Compressor:
    """Returns the compressor of a user's argument."""
    if compression is None:
        compression = config.settings().compression
    compression = getattr(compression, "wire", compression)
    if isinstance(compression, str):
        known = {
            member.name: member for member in (Compression.none, Compression.fp16, Compression.bf16)
        }
        compression = known.get(compression.lower(), compression)
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, GradientCompression):
        raise errors.ArgumentError(
            where,
            "compression to be none, fp16, bf16 or a Compressor for an operation on values, which "
            "keeps no error for the next call",
            compression.name,
            "Pass it to DistributedOptimizer or DistributedGradientTape.",
        )
    kind = errors.ArgumentError if isinstance(compression, str) else errors.ArgumentTypeError
    raise kind(
        where,
        "compression to be none, fp16, bf16 or an instance of keras_dist.Compressor",
        repr(compression),
        "Use keras_dist.Compression.none, .fp16 or .bf16.",
    )


class Wire:
    """The wire format of numbers of one dtype; each compressed array is checked.

    Narrow floats, which have few bits, and integers, which must stay exact, are not compressed.
    """

    def __init__(self, compressor: Compressor, original: np.dtype, where: str):
        self._compressor, self._original, self._where = compressor, original, where
        is_wide = original.kind == "f" and original.itemsize in (4, 8)
        self.is_plain = compressor is Compression.none or not is_wide
        self.dtype = original
        if not self.is_plain:
            probe = np.asarray(compressor.compress(np.zeros(3, original)))
            self.dtype = probe.dtype
            if probe.dtype.hasobject:
                raise self._invalid("compress", "numbers", f"dtype {probe.dtype}")
            self.unpack(self.pack(np.zeros(3, original)))

    def pack(self, array: np.ndarray) -> np.ndarray:
        if self.is_plain:
            return array
        # Overflow is the caller's to judge: it reaches every rank.
        with np.errstate(all="ignore"):
            packed = np.asarray(self._compressor.compress(array))
        return self._checked("compress", packed, array.shape, self.dtype)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        if self.is_plain:
            return array
        with np.errstate(all="ignore"):
            numbers = np.asarray(self._compressor.decompress(array, self._original))
        return self._checked("decompress", numbers, array.shape, self._original)

    def _checked(
        self, method: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        if array.shape != shape or array.dtype != dtype:
            expected = f"an array of shape {shape} and dtype {dtype}"
            raise self._invalid(method, expected, f"shape {array.shape} and dtype {array.dtype}")
        return array

    def _invalid(self, method: str, expected: str, received: str) -> errors.ArgumentError:
        return errors.ArgumentError(
            self._where,
            f"{method} of {self._compressor.name} to return {expected}",
            received,
            "Work element by element; let the dtype depend only on the dtype of the argument.",
        )
