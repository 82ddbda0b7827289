"""The states of the global random generators of a process, and numbers that differ between ranks.

Ranks that start from one seed draw equal numbers, which builds equal models, but in training would
drop the same units for all of their samples. Samplers of torch may need equal numbers, so train
steps draw from a stream of their own.
"""

import base64
import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist._compat.keras.seeds import drawn_seeds, generators_elsewhere, global_generator
from keras_dist.data.nested import is_a
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.training.model_state import random_states, to_numpy, variable_name

# Generators that steps draw from. Scripts draw splits, orders of samples and initial weights from
# the others, and also from torch's, whose stream in steps is separate.
OF_STEPS = ("keras", "tensorflow")
ALL = (*OF_STEPS, "torch", "python", "numpy")

# Seeds by generator for the end of the running fit, equal on ranks that began it alike.
_afterwards: dict[str, int] = {}
# The states of torch's generators in the next train step; empty without a stream of steps.
_torch_steps: dict[str, Any] = {}


def separate_seeds(*layers: keras.Layer, root_rank: int = 0) -> None:
    """Gives every rank its own random numbers, from now on.

    `fit` with `keras_dist.callbacks()` needs no call for its model. This function is for loops of
    your own and for augmentation in `map` or in numpy. It sets the generators of the given layers
    and models, also those with a `seed`, and those of the process: Python's, numpy's, Keras',
    torch's if it is imported, and TensorFlow's if it has a seed. The root keeps its numbers; those
    of other ranks follow from the same seeds. `keras.utils.set_random_seed` with the same seed on
    all ranks makes the generators of the processes equal again.

    Call it after the model and the data are made, since their initial weights, splits and shuffles
    must be equal, and after `broadcast_variables`, which copies the root's generators. In
    TensorFlow, functions that are traced already keep their seeds for `tf.random`.

    Collective: every rank, with the same layers; blocks.

    Args:
        *layers: built models and layers that draw random numbers.
        root_rank: rank that keeps its numbers. Defaults to 0.

    Raises:
        MismatchError: the layers of the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    keras.utils.set_random_seed(1)
    augment = keras.layers.RandomFlip()
    keras_dist.separate_seeds(model, augment)
    ```
    """
    runtime.communicator().index_of_root(root_rank)
    for layer in layers:
        _separate_states([*random_states(layer), *generators_elsewhere(layer)], root_rank)
    _separate(ALL, root_rank)


def separate_in_fit(model: keras.Model, root_rank: int = 0) -> None:
    """Gives every rank its own numbers in the steps of the running fit. Collective; blocks."""
    # Afterwards the generators of the process are equal on all ranks again if they were before, so
    # that a script may go on to draw splits of its data.
    global _afterwards
    separate_generators(model, root_rank)
    found = _separate(OF_STEPS, root_rank)
    _afterwards = {name: _derived(state, "after") for name, state in found.items()}
    if keras.config.backend() == "torch":
        drawn = int(sys.modules["torch"].randint(2**31, ()))  # so that the next fit differs
        outside = _of_torch()
        sys.modules["torch"].manual_seed(_derived(drawn, runtime.rank()))
        steps_of(_of_torch())  # a stream of their own
        _set_torch(outside)


@contextlib.contextmanager
def separable() -> Iterator[None]:
    """Ends what `separate_in_fit` does in it, also after an error."""
    global _afterwards
    before, _afterwards = _afterwards, {}
    steps_before = steps_of({})
    try:
        yield
    finally:
        steps_of(steps_before)
        for name, seed in _afterwards.items():
            _set(name, seed)
        _afterwards = before


def separate_generators(model: keras.Model, root_rank: int = 0) -> None:
    """Gives the generators of a model a stream for each rank, the root its own. Collective."""
    # So a run on one rank equals a run without keras_dist. When called again, every rank continues
    # at the root's position.
    _separate_states(random_states(model), root_rank)


def _separate_states(generators: list[Any], root_rank: int) -> None:
    comm = runtime.fit_communicator()
    received = _engine.collectives.broadcast(
        comm,
        [to_numpy(generator) for generator in generators],
        [variable_name(generator) for generator in generators],
        root_rank,
        operation="the broadcast of a model's random seeds",
        remedy=SAME_MODEL,
    )
    if runtime.rank() != root_rank:
        for generator, value in zip(generators, received, strict=True):
            generator.assign(_own_state(value, comm.rank))


def _separate(names: tuple[str, ...], root_rank: int) -> dict[str, Any]:
    """Seeds generators of this process by rank, except on the root; returns their states before."""
    if runtime.fit_size() == 1:
        return {}
    before = random.getstate()
    global_generator()  # Keras draws its seed from Python's when it is first used
    random.setstate(before)
    known = states() | _of_tensorflow()
    found = {name: known[name] for name in names if name in known}
    if runtime.rank() != root_rank:
        for name, state in found.items():
            _set(name, _derived(state, runtime.fit_rank()))
    return found


def _set(name: str, seed: int) -> None:
    if name == "keras":
        if (state := drawn_seeds()) is not None:  # `clear_session` removes it
            state.assign(np.array([seed, 0], state.dtype))
    elif name == "python":
        random.seed(seed)
    elif name == "numpy":
        np.random.seed(seed)
    elif name == "torch":
        sys.modules["torch"].manual_seed(seed)
    else:
        sys.modules["tensorflow"].random.set_seed(seed)


def _of_tensorflow() -> dict[str, Any]:
    """Returns the global seed of TensorFlow, if there is one."""
    if sys.modules.get("tensorflow") is None:  # not imported, or hidden
        return {}
    from keras_dist.data import tf_order

    return {"tensorflow": tf_order.global_seed()} if tf_order.is_seeded() else {}


def _derived(state: Any, key: Any) -> int:
    """Returns a seed that follows from the state of a generator, of 31 bits for any generator."""
    digest = hashlib.blake2b(repr((state, key)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def _own_state(generator_state: np.ndarray, rank: int) -> np.ndarray:
    """Returns the state (seed, counter) of a generator with a seed derived for this rank."""
    own = generator_state.copy()
    seed = int(generator_state[0]) & 0xFFFFFFFF
    drawn = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)
    own[0] = drawn.astype(own.dtype)[0]
    return own


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
    _set_torch(steps_of({}))  # a step within this one goes on with the numbers of now
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
