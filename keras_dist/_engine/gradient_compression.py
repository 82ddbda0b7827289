"""Options of the compressions of gradients that send a part and keep the rest for the next step."""

import ast
import dataclasses
import math
import re
from typing import Any, ClassVar

from keras_dist import errors

WHERE = "[keras_dist]"


@dataclasses.dataclass(frozen=True)
class GradientCompression:
    """A compression of gradients: a rank adds to each what it has not sent in earlier steps."""

    start_step: int = 0

    def __post_init__(self) -> None:
        _check_count("start_step", self.start_step, 0)

    @property
    def name(self) -> str:
        """Name that the ranks compare, and by which it is saved and found again."""
        # A float of numpy has a text that `gradient_compression_of` does not read.
        given = {k: float(v) if isinstance(v, float) else v for k, v in vars(self).items()}
        fields = ", ".join(f"{field}={value!r}" for field, value in given.items())
        return f"{type(self).__name__.lower()}({fields})"


@dataclasses.dataclass(frozen=True)
class PowerSGD(GradientCompression):
    """A matrix is sent as the product of two narrow ones."""

    rank: int = 4
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("rank", self.rank, 1)
        _check_number("min_compression_rate", self.min_compression_rate, math.inf)


@dataclasses.dataclass(frozen=True)
class TopK(GradientCompression):
    """The elements of largest magnitude are sent, with their places."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("ratio", self.ratio, 1.0)


@dataclasses.dataclass(frozen=True)
class Int8(GradientCompression):
    """Numbers are sent as integers of a few bits, with a scale for each block of them."""

    bits: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class Int4(Int8):
    """Numbers are sent as integers of 4 bits."""

    bits: ClassVar[int] = 4


METHODS: dict[str, type[GradientCompression]] = {
    "powersgd": PowerSGD,
    "topk": TopK,
    "int8": Int8,
    "int4": Int4,
}


def gradient_compression_of(name: str) -> GradientCompression | None:
    """Returns the compression of a name, such as `powersgd` or `topk(ratio=0.1)`, if it is one."""
    found = re.fullmatch(r"(\w+)(?:\((.*)\))?", name.strip().lower())
    if found is None or found[1] not in METHODS:
        return None
    try:
        pairs = [item.split("=") for item in (found[2] or "").split(",") if item.strip()]
        options: dict[str, Any] = {key.strip(): ast.literal_eval(text) for key, text in pairs}
        return METHODS[found[1]](**options)
    except (TypeError, ValueError, SyntaxError) as error:
        if isinstance(error, errors.KerasDistError):
            raise
        return None


def _check_count(name: str, value: Any, least: int) -> None:
    expected, remedy = f"{name} to be an integer, {least} or more", "Omit it for the default."
    if not isinstance(value, int) or isinstance(value, bool):
        raise errors.ArgumentTypeError(WHERE, expected, f"{value!r}", remedy)
    if value < least:
        raise errors.ArgumentError(WHERE, expected, f"{value!r}", remedy)


def _check_number(name: str, value: Any, most: float) -> None:
    limit = "" if most == math.inf else f" and at most {most:g}"
    expected, remedy = f"{name} to be a number above 0{limit}", "Omit it for the default."
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise errors.ArgumentTypeError(WHERE, expected, f"{value!r}", remedy)
    if not 0 < value <= most or value == math.inf:
        raise errors.ArgumentError(WHERE, expected, f"{value!r}", remedy)
