"""The version of Keras."""

import keras


def version() -> str:
    """Returns the name and the version of Keras, and of its backend."""
    return f"Keras {keras.__version__} on {keras.backend.backend()}"


def release() -> tuple[int, ...]:
    """Returns the first two numbers of the version."""
    return tuple(int(number) for number in keras.__version__.split(".")[:2])


def uses(backend: str) -> bool:
    """Returns whether Keras runs on a backend."""
    return bool(keras.backend.backend() == backend)
