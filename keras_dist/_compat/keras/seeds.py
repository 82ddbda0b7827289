"""Names of Keras: seed generators that are no public attributes of layers."""

from typing import Any

from keras_dist._compat.contract import Owner, require
from keras_dist._compat.keras.versions import release, version

SEED_GENERATOR = Owner("keras.src.random.seed_generator")
PURPOSE = "to back up and restore the global seed generator"
WITHOUT = "a resumed fit would differ from an uninterrupted one"


def drawn_seeds() -> Any:
    """Returns the state of the global seed generator; `None` if Keras has not created it."""
    name = "global_seed_generator"
    if KEY.applies():
        name = require(KEY, version).GLOBAL_SEED_GENERATOR
    generator = require(ATTRIBUTE, version).get_global_attribute(name)
    return None if generator is None else generator.state


def global_generator() -> Any:
    """Returns the state of the global seed generator; creates it if necessary."""
    return require(GENERATOR, version).global_seed_generator().state


def generators_elsewhere(layer: Any) -> list[Any]:
    """Returns the states of generators that a layer and those in it use in `tf.data` only."""
    # Keras makes them, on JAX and torch, when a pipeline first calls the layer.
    return [
        generator.state
        for each in layer._flatten_layers()
        for _, generator in sorted(each.__dict__.get("_backend_generators", {}).items())
    ]


ATTRIBUTE = Owner("keras.src.backend.common.global_state").method(
    "get_global_attribute(name)", PURPOSE, WITHOUT, on_use=True
)
KEY = SEED_GENERATOR.name(
    "GLOBAL_SEED_GENERATOR",
    PURPOSE,
    WITHOUT,
    on_use=True,
    applies=lambda: release() >= (3, 13),  # earlier versions use a literal
)
GENERATOR = SEED_GENERATOR.method("global_seed_generator()", PURPOSE, WITHOUT, on_use=True)

CONTRACT = (ATTRIBUTE, KEY, GENERATOR)
