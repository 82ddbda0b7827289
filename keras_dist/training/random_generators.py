"""The states of the global random generators of a process.

The generators of Python, numpy and torch shuffle training data; those of torch and Keras serve
layers without a seed, such as `Dropout`. torch is used only if the script has imported it.

Samplers of torch draw from its generator too, and may need the same numbers on all ranks. The train
steps of a fit therefore draw from a stream of their own, `torch_steps`.
"""

import base64
import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_dist._compat.keras.seeds import drawn_seeds, global_generator
from keras_dist.data.kinds import is_a

# The states of torch's generators in the next train step; empty without a stream of steps.
_torch_steps: dict[str, Any] = {}


def states(data: Any = None) -> dict[str, Any]:
    """Returns the states of all generators as JSON values."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, _text(np.array(numbers, np.uint32)), gauss]}
    name, key, *more = np.random.get_state(legacy=True)
    if name == "MT19937":  # a script may have replaced the generator
        found["numpy"] = [name, _text(np.asarray(key)), *more]
    if (seeds := drawn_seeds()) is not None:
        found["keras"] = keras.ops.convert_to_numpy(seeds).tolist()
    found |= _texts(_of_torch())
    if _torch_steps:
        found["torch steps"] = _texts(_torch_steps)
    found["loader"] = [_text(generator.get_state().numpy()) for generator in _of_loader(data)]
    return found


def restore(states: Mapping[str, Any], data: Any = None) -> None:
    """Restores the generators."""
    if "keras" in states:  # first: creating the generator draws its seed from Python's
        variable = global_generator()
        variable.assign(np.array(states["keras"], variable.dtype))
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(_array(numbers, np.uint32).tolist()), gauss))
    if "numpy" in states:
        name, key, *more = states["numpy"]
        np.random.set_state((name, _array(key, np.uint32), *more))
    if sys.modules.get("torch") is None:
        return
    _set_torch(_tensors(states))
    if _torch_steps and "torch steps" in states:
        steps_of(_tensors(states["torch steps"]))
    for generator, text in zip(_of_loader(data), states.get("loader", ()), strict=False):
        generator.set_state(_tensor(text))


def seed_steps(seed: int) -> None:
    """Gives train steps a stream of torch's generators of their own. torch must be imported."""
    outside = _of_torch()
    sys.modules["torch"].manual_seed(seed)
    steps_of(_of_torch())
    _set_torch(outside)


def steps_of(states: dict[str, Any]) -> dict[str, Any]:
    """Sets the stream of train steps; empty for none. Returns the one before."""
    global _torch_steps
    before, _torch_steps = _torch_steps, states
    return before


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Draws from the stream of train steps, if they have one."""
    if not _torch_steps:
        yield
        return
    outside = _of_torch()
    _set_torch(_torch_steps)
    try:
        yield
    finally:
        steps_of(_of_torch())
        _set_torch(outside)


def _of_torch() -> dict[str, Any]:
    torch, found = sys.modules.get("torch"), dict[str, Any]()
    if torch is not None:
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_torch(states: Mapping[str, Any]) -> None:
    torch = sys.modules["torch"]
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _texts(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(tensor.numpy()) for name, tensor in tensors.items()}


def _tensors(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tensor(texts[name]) for name in ("torch", "cuda") if name in texts}


def _tensor(text: str) -> Any:
    return sys.modules["torch"].from_numpy(_array(text))


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
