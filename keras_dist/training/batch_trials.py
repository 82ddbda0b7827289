"""What a number that a loss or a metric of the user returns for a batch is of those of its halves.

It is tried on a few rows, apart from variables.
"""

import contextlib
import functools
import math
import numbers
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, errors
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.loss_functions import function_of
from keras_dist._compat.keras.losses import Measured
from keras_dist._compat.keras.metrics import function_of as function_of_metric
from keras_dist.training.model_state import to_numpy

# Outputs of the rows that are tried differ clearly, however many numbers a row has.
LEVELS = np.array([0.15, 0.8, 0.3, 0.65, 0.45, 0.55], "float32")
ROWS, SIZE = len(LEVELS), 3  # SIZE is that of axes of unknown size
MOST_ELEMENTS = 2**18
MEAN, SUM, NEITHER, ROWWISE = "mean", "sum", "neither", "a value for each row"
MOST_PARTS = 100  # of the code and the values of a function that are read

# What is known of a loss or a metric: a step calls it each time.
_known: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def _tried(
    function: Callable[..., Any], make_rows: Callable[..., Any], missing: Iterable[float]
) -> str | None:
    """Returns what `_of_halves` does, `NEITHER` for a mean that leaves out missing targets."""
    found = _of_halves(function, make_rows)
    if found == MEAN:
        is_torch = keras.config.backend() == "torch"
        # A class that there is not ends the use of a GPU by torch.
        with keras.device("cpu:0") if is_torch else contextlib.nullcontext():
            for value in missing:
                if _of_halves(function, functools.partial(make_rows, value)) == NEITHER:
                    return NEITHER
    return found


def _missing_targets(function: Any) -> list[float]:
    """Returns what a function of the user may take for missing targets, by what it mentions."""
    # These are 0, negative numbers, 255 and NaN: others are classes. A function is not called with
    # NaN for nothing, as it may keep a mean of its values.
    found, parts, seen = set[float](), [function], set[int]()
    while parts and len(seen) < MOST_PARTS:
        part = parts.pop(0)
        part = getattr(part, "__wrapped__", part) if callable(part) else part
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, numbers.Real):
            found.add(float(part))
        elif isinstance(part, functools.partial):
            parts += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, dict | list | tuple):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, types.FunctionType) and not is_part_of_keras(part):
            code, known = part.__code__, part.__globals__
            parts += [*code.co_consts, *(part.__defaults__ or ())]
            cells = [cell for cell in part.__closure__ or () if cell != types.CellType()]
            parts += [cell.cell_contents for cell in cells]
            parts += [known[name] for name in code.co_names if name in known]
            found |= {math.nan for name in code.co_names if "nan" in name or "finite" in name}
        elif isinstance(part, types.CodeType):
            parts += part.co_consts
        elif isinstance(part, types.MethodType):
            parts += [part.__func__, part.__self__]
        elif isinstance(part, keras.losses.Loss):
            parts += [type(part).call, *vars(part).values()]
    return sorted(value for value in found if value <= 0 or value == 255 or math.isnan(value))


def _of_halves(function: Callable[..., Any], make_rows: Callable[[], Any]) -> str | None:
    """Returns what a number for targets and outputs is of those of their halves, if known."""
    try:
        given = make_rows()
        whole, *parts = (
            np.array(to_numpy(ops.convert_to_tensor(function(*(each[rows] for each in given)))))
            for rows in (slice(None), slice(ROWS // 2), slice(ROWS // 2, None))
        )
        if whole.ndim:
            return ROWWISE
        mean, tolerance = np.mean(parts), 2e-2 if whole.dtype.itemsize == 2 else 1e-3
        if not np.isfinite(whole) or math.isclose(whole, mean, rel_tol=tolerance, abs_tol=1e-6):
            return MEAN
        return SUM if math.isclose(whole, sum(parts), rel_tol=tolerance) else NEITHER
    except errors.KerasDistError:  # it communicates, and the ranks differ
        raise
    except Exception:  # of other people's code, for data that it was not made for
        return None


def as_tried(own: Measured) -> Measured:
    """Returns a loss that is one number with the reduction that a trial has shown."""
    if own.number is None:
        return own
    name, loss, *arguments = own.number
    found = None
    with contextlib.suppress(TypeError):  # it has no hash
        found = _known.get(loss)
    if found is None:
        with keras.StatelessScope(), _backends.active().eagerly():
            make_rows = functools.partial(_rows_like, *arguments)
            missing = _missing_targets(loss)
            found = _tried(function_of(loss), make_rows, missing) or MEAN
        with contextlib.suppress(TypeError):
            _known[loss] = found
    if found == SUM:
        return Measured(own.value, "sum", 1.0, True, True)
    if found == NEITHER:
        return Measured(
            own.value, own.reduction, own.denominator, own.is_count, own.is_of_rows, name
        )
    return own


def _rows_like(targets: Any, outputs: Any, missing: float | None = None) -> list[Any]:
    """Returns a few rows of the shapes and the dtypes of tensors; see `_tensors` for `missing`."""
    shapes = []
    for like in (targets, outputs):
        shapes.append((ROWS, *(SIZE if size is None else size for size in like.shape[1:])))
        if math.prod(shapes[-1]) > MOST_ELEMENTS:
            raise ValueError(f"{shapes[-1]} is too large to be tried")
    tensors = _tensors(_bits(shapes[0]).astype("float32"), _outputs(shapes[1]), missing)
    return [
        ops.cast(tensor, like.dtype)
        for tensor, like in zip(tensors, (targets, outputs), strict=True)
    ]


def _bits(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape) % 2


def _outputs(shape: tuple[int, ...]) -> np.ndarray:
    """Returns outputs that may be numbers, logits and probabilities, from 0.1 to 0.9."""
    noise = np.random.default_rng(0).uniform(-0.05, 0.05, shape)
    outputs = LEVELS.reshape(-1, *(1 for _ in shape[1:])) + noise.astype("float32")
    if shape[1:]:  # rows with other logits, too
        outputs[..., 1:2] = 0.55 - outputs[..., 1:2] / 2
    return outputs


def _tensors(targets: np.ndarray, outputs: np.ndarray, missing: float | None = None) -> list[Any]:
    """Returns targets and outputs; with `missing`, targets are ones of which some miss."""
    if missing is not None:
        targets = np.ones_like(targets)
        targets[[0, 1, 3]] = missing  # other numbers of rows than ones in each half
    return [ops.convert_to_tensor(drawn) for drawn in (targets, outputs)]


def averages_no_means(metric: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a metric averages numbers of batches that differ from those of parts."""
    # As the root of a mean square: its average over ranks is not that of their common batch.
    function, options = function_of_metric(metric)
    if function is None or isinstance(function, keras.losses.Loss) or is_part_of_keras(function):
        return False
    if metric not in _known:
        _known[metric] = _tried_on_kinds(functools.partial(function, **options), shapes)
    return _known[metric] == NEITHER


def _tried_on_kinds(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns `MEAN` for a function that is a mean of halves for each kind of targets it takes."""
    tried: list[str] = []
    missing = _missing_targets(function)
    for pair in _targets_and_outputs(shapes):
        if tried and pair[0].shape != pair[1].shape:
            break  # a class for each sample would be broadcast
        found = _tried(function, functools.partial(_tensors, *pair), missing)
        if found == ROWWISE:
            return ROWWISE
        if found is not None:
            tried.append(found)
    return MEAN if all(each == MEAN for each in tried) else NEITHER


def _targets_and_outputs(
    shapes: Iterable[tuple[int, ...]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields targets and outputs of a few samples: numbers, bits, and classes."""
    rng = np.random.default_rng(0)
    small = [shape for shape in shapes if math.prod(shape) <= MOST_ELEMENTS]
    outputs = [_outputs((ROWS, *shape)) for shape in dict.fromkeys([*small, (1,), (3,)])]
    for draw in (
        lambda like: rng.normal(0, 3, like.shape).astype(np.float32),
        lambda like: _bits(like.shape).astype(np.float32),
        lambda like: _bits(like.shape[:1]),
    ):
        for each in outputs:
            yield draw(each), each
