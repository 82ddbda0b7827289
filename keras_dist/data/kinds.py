"""Kinds of data, recognised by the names of classes without importing frameworks."""

from typing import Any

__all__ = ["is_a", "is_tensor", "is_tf_dataset"]


def is_a(data: Any, package: str, *names: str) -> bool:
    """Returns whether data is an instance of a class of a package.

    Args:
        data: anything.
        package: name of the package, such as `"torch"`.
        *names: names of its classes.
    """
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == package
        for kind in type(data).__mro__
    )


def is_tf_dataset(data: Any) -> bool:
    """Returns whether data is a `tf.data.Dataset`."""
    return is_a(data, "tensorflow", "DatasetV2")


def is_tensor(data: Any) -> bool:
    """Returns whether numpy converts data to an array: of a framework, or of pandas."""
    return hasattr(data, "__array__") and not is_a(data, "tensorflow", "RaggedTensor")
