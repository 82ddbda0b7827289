"""Names of Keras: the seed generator that is used where a script gives no seed."""

from typing import Any

from keras_dist._compat.contract import Name, require
from keras_dist._compat.keras.versions import release, version

__all__ = ["CONTRACT", "drawn_seeds", "global_generator"]

SEED_GENERATOR = "keras.src.random.seed_generator"
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


ATTRIBUTE = Name(
    "keras.src.backend.common.global_state",
    "get_global_attribute",
    PURPOSE,
    WITHOUT,
    ("name",),
    on_use=True,
)
KEY = Name(
    SEED_GENERATOR,
    "GLOBAL_SEED_GENERATOR",
    PURPOSE,
    WITHOUT,
    on_use=True,
    applies=lambda: release() >= (3, 13),  # earlier versions use a literal
)
GENERATOR = Name(SEED_GENERATOR, "global_seed_generator", PURPOSE, WITHOUT, (), on_use=True)

CONTRACT = (ATTRIBUTE, KEY, GENERATOR)
