"""Random numbers that differ from rank to rank.

Ranks that start from one seed draw equal numbers, which builds equal models. Each rank has other
samples, so that in training equal numbers would drop the same units for all of them.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist._compat.keras.seeds import drawn_seeds, generators_elsewhere, global_generator
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.training import random_generators
from keras_dist.training.model_state import random_states, to_numpy, variable_name

# Generators that steps draw from. Scripts draw splits, orders of samples and initial weights from
# the others, and also from torch's, whose stream in steps is separate.
OF_STEPS = ("keras", "tensorflow")
ALL = (*OF_STEPS, "torch", "python", "numpy")

# Seeds by generator for the end of the running fit, equal on ranks that began it alike.
_afterwards: dict[str, int] = {}


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
    """Gives every rank its own random numbers in the steps of the running fit.

    Afterwards the generators of the process are equal on all ranks again if they were before, so
    that a script may go on to draw splits of its data.

    Collective: every rank; blocks.
    """
    global _afterwards
    separate_generators(model, root_rank)
    found = _separate(OF_STEPS, root_rank)
    _afterwards = {name: _derived(state, "after") for name, state in found.items()}
    if keras.config.backend() == "torch":
        drawn = int(sys.modules["torch"].randint(2**31, ()))  # so that the next fit differs
        random_generators.seed_steps(_derived(drawn, runtime.rank()))


@contextlib.contextmanager
def separable() -> Iterator[None]:
    """Ends what `separate_in_fit` does in it, also after an error."""
    global _afterwards
    before, _afterwards = _afterwards, {}
    steps_before = random_generators.steps_of({})
    try:
        yield
    finally:
        random_generators.steps_of(steps_before)
        for name, seed in _afterwards.items():
            _set(name, seed)
        _afterwards = before


def separate_generators(model: keras.Model, root_rank: int = 0) -> None:
    """Gives the generators of a model a stream for each rank, derived from the root's seeds.

    The root keeps its stream, so that a run on one rank equals a run without keras_dist. When
    called again, every rank continues at the root's position.

    Collective: every rank; blocks.
    """
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
    states = random_generators.states() | _of_tensorflow()
    found = {name: states[name] for name in names if name in states}
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
