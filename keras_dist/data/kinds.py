"""Type checks by class name, which import no framework."""

from typing import Any


def is_a(data: Any, package: str, *names: str) -> bool:
    """Tells whether an object is an instance of a class of a package, or of a subclass."""
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == package
        for kind in type(data).__mro__
    )


def is_tf_dataset(data: Any) -> bool:
    """Tells whether an object is a `tf.data.Dataset`."""
    return is_a(data, "tensorflow", "DatasetV2")


def is_tensor(data: Any) -> bool:
    """Tells whether numpy can convert an object: a framework's tensor, or pandas data."""
    return hasattr(data, "__array__") and not is_a(data, "tensorflow", "RaggedTensor")
