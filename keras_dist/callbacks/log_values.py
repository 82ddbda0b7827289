"""Logs of an epoch on all ranks: numbers in them become equal, so that callbacks decide alike."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.training.model_state import bytes_of, to_numpy

#: names of a value in nested logs, the outermost first
Path = tuple[Any, ...]


def as_numbers(logs: Any) -> Any:
    """Returns nested logs with each number, tensor and array as a numpy array of its own."""
    return _mapped(logs, lambda path, leaf: leaf if (own := number_of(leaf)) is None else own)


def is_close(found: Any, expected: Any) -> bool:
    """Returns whether two values of logs, made by `as_numbers`, are equal up to rounding."""
    ours, theirs = dict(_numbers({"": found})), dict(_numbers({"": expected}))
    return ours.keys() == theirs.keys() and all(
        value.shape == theirs[path].shape
        and np.allclose(value, theirs[path], rtol=1e-5, equal_nan=True)
        for path, value in ours.items()
    )


def agreed_logs(logs: dict[str, Any], counts: bool) -> dict[str, Any]:
    """Averages the numbers in logs over the ranks that have them.

    Scalars become floats. Booleans are true if they are on any rank. Numbers that are equal on all
    ranks do not change, and other values, such as text and `None`, stay those of the rank. A rank
    that lacks a scalar, or has `None` in its place, receives that of the others. Arrays are
    averaged if all ranks have them in one shape.

    Collective: every rank; blocks.
    """
    own = dict(_numbers(logs))
    mine = counts, {path: _described(value) for path, value in own.items()}
    everyone = _engine.collectives.allgather_object(
        runtime.fit_communicator(), mine, operation="averaging the logs"
    )
    counting = [found for counted, found in everyone if counted]
    counting = counting or [found for _, found in everyone]
    agreed: dict[Path, Any] = {}
    arrays: list[Path] = []
    for path in dict.fromkeys(path for found in counting for path in found):
        shapes = {found[path][0] if path in found else None for _, found in everyone}
        contents = [found[path][1] for found in counting if path in found]
        if shapes <= {(), None}:
            agreed[path] = _average(contents)
        elif len(shapes) == 1 and len(set(contents)) > 1:
            arrays.append(path)
    agreed.update(_averages(own, arrays, counts, len(counting)))

    def value_of(path: Path, leaf: Any) -> Any:
        is_number = leaf is None or isinstance(leaf, np.ndarray)
        return agreed.get(path, leaf) if is_number else leaf

    changed: dict[str, Any] = _mapped(logs, value_of)
    for path, value in agreed.items():
        _insert(changed, path, value)
    return changed


def _average(values: list[bool | float]) -> bool | float:
    if all(isinstance(value, bool) for value in values):
        return any(values)
    return float(values[0]) if len(set(values)) == 1 else float(np.mean(values))


def _averages(
    own: dict[Path, np.ndarray], paths: list[Path], counts: bool, counting: int
) -> dict[Path, np.ndarray]:
    """Returns averages of arrays over the ranks that count. Collective unless there are none."""
    if not paths:
        return {}
    comm = runtime.fit_communicator()
    values = [own[path] for path in paths]
    floats = [value if value.dtype.kind == "f" else value.astype(float) for value in values]
    sums = _engine.collectives.allreduce(
        comm,
        [value * counts for value in floats],
        [".".join(map(str, path)) for path in paths],
        _engine.OpOptions(_engine.ReduceOp.SUM),
        bucket_nbytes(comm),
    )
    return {path: value / counting for path, value in zip(paths, sums, strict=True)}


def _described(value: np.ndarray) -> tuple[tuple[int, ...], bool | float | bytes]:
    """Returns the shape of an array, and its value, or for larger ones a digest."""
    if value.ndim:
        return value.shape, hashlib.blake2b(bytes_of(value).data, digest_size=16).digest()
    return (), bool(value) if value.dtype == bool else float(value)


def number_of(leaf: Any) -> np.ndarray | None:
    """Returns a copy of a number, tensor or array; `None` for other values."""
    if leaf is None or isinstance(leaf, str | bytes):
        return None
    try:
        array = np.array(to_numpy(leaf))
    except Exception:  # of a framework, about a value that is no number
        return None
    if array.dtype.kind == "V" and not array.dtype.names:  # such as bfloat16
        return array.astype(np.float32)
    return array if array.dtype.kind in "biuf" else None


def _leaves(logs: dict[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _numbers(logs: dict[Any, Any]) -> Iterator[tuple[Path, np.ndarray]]:
    return ((path, leaf) for path, leaf in _leaves(logs) if isinstance(leaf, np.ndarray))


def _mapped(logs: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    if not isinstance(logs, dict):
        return change(path, logs)
    return {name: _mapped(value, change, (*path, name)) for name, value in logs.items()}


def _insert(logs: dict[Any, Any], path: Path, value: Any) -> None:
    """Sets a value in nested logs that lack it."""
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
        if not isinstance(logs, dict):
            return
    logs.setdefault(path[-1], value)
