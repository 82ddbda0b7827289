"""The states of the global random generators of a process.

The generators of Python, numpy and torch shuffle training data; those of torch and Keras serve
layers without a seed, such as `Dropout`. torch is used only if the script has imported it.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist._compat.keras.seeds import drawn_seeds, global_generator
from keras_dist.data.kinds import is_a

__all__ = ["restore", "states"]


def states(data: Any = None) -> dict[str, Any]:
    """Returns the states of all generators as JSON values.

    Args:
        data: the training data; a torch `DataLoader` may have its own generators. Defaults to
            `None`.
    """
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, _text(np.array(numbers, np.uint32)), gauss]}
    name, key, *more = np.random.get_state(legacy=True)
    if name == "MT19937":  # a script may have replaced the generator
        found["numpy"] = [name, _text(np.asarray(key)), *more]
    if (seeds := drawn_seeds()) is not None:
        found["keras"] = keras.ops.convert_to_numpy(seeds).tolist()
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = _text(torch.get_rng_state().numpy())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    found["loader"] = [_text(generator.get_state().numpy()) for generator in _of_loader(data)]
    return found


def restore(states: Mapping[str, Any], data: Any = None) -> None:
    """Restores the generators.

    Args:
        states: from `states`, of this or another process. Generators not in it are unchanged.
        data: the training data.
    """
    if "keras" in states:  # first: creating the generator draws its seed from Python's
        variable = global_generator()
        variable.assign(np.array(states["keras"], variable.dtype))
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(_array(numbers, np.uint32).tolist()), gauss))
    if "numpy" in states:
        name, key, *more = states["numpy"]
        np.random.set_state((name, _array(key, np.uint32), *more))
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(_array(states["torch"])))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(states["cuda"])))
    for generator, text in zip(_of_loader(data), states.get("loader", ()), strict=False):
        generator.set_state(torch.from_numpy(_array(text)))


def _of_loader(data: Any) -> list[Any]:
    """Returns the generators of a `DataLoader` and its samplers."""
    if not is_a(data, "torch", "DataLoader"):
        return []
    from keras_dist._compat.torch import generators_of

    return generators_of(data)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any = np.uint8) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
