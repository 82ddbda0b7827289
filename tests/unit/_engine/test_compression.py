"""Compression: rounding of values, and errors of invalid compressors."""

import ml_dtypes
import numpy as np
import pytest

from keras_dist import config, errors
from keras_dist._engine.compression import Compression, Compressor, Wire, parse_compression

# Among them the largest of float16, and those above it that are rounded to it or to infinity.
LARGE = [65504.0, 65519.0, 65520.0, -1e6]
VALUES = np.array([0.0, -0.0, 1.0, 1 / 3, -2.5e-3, 1e-9, *LARGE, np.inf, -np.inf, np.nan])


class Half(Compressor):
    def __init__(self, factor=1024.0):
        self.factor = factor

    def compress(self, array):
        return (array * self.factor).astype(np.float16)

    def decompress(self, array, dtype):
        return array.astype(dtype) / self.factor


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "narrow"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16), ("none", None)]
)
def test_numbers_are_rounded_once(name, narrow, dtype):
    numbers = VALUES.astype(dtype)
    wire = Wire(parse_compression(name, "[test]"), numbers.dtype, "[test]")
    packed = wire.pack(numbers)
    assert wire.dtype == packed.dtype == np.dtype(narrow or dtype)
    with np.errstate(over="ignore"):
        expected = numbers.astype(narrow or dtype).astype(dtype)
    assert wire.unpack(packed).dtype == dtype
    assert wire.unpack(packed).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32, np.complex64, bool])
def test_other_dtypes_are_not_compressed(dtype):
    assert Wire(Compression.fp16, np.dtype(dtype), "[test]").is_plain


def test_compressors_differ_by_name():
    assert Half().name == "Half(factor=1024.0)"
    assert Half(2.0).name != Half().name == Half().name


def test_the_default_is_that_of_the_environment(monkeypatch):
    monkeypatch.setattr(config, "settings", lambda: config.parse({}))
    assert parse_compression(None, "[test]") is Compression.none
    environment = {"KERAS_DIST_COMPRESSION": "BF16"}
    monkeypatch.setattr(config, "settings", lambda: config.parse(environment))
    assert parse_compression(None, "[test]") is Compression.bf16
    assert parse_compression(Compression.none, "[test]") is Compression.none


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"compress": lambda self, array: array[:1]}, r"compress of .* shape \(3,\)"),
        ({"compress": lambda self, array: array.astype(object)}, "to return numbers"),
        ({"decompress": lambda self, array, dtype: array}, "decompress of .* dtype float32"),
    ],
)
def test_a_wrong_compressor_is_refused(methods, message):
    wrong = type("Wrong", (Half,), methods)()
    with pytest.raises(errors.ArgumentError, match=message):
        Wire(wrong, np.dtype(np.float32), "[test]")
