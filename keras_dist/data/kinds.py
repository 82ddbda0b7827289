"""What data is, told by the names of its classes: no framework is imported to ask."""

from typing import Any

__all__ = ["is_a", "is_tensor", "is_tf_dataset"]


def is_a(data: Any, package: str, *names: str) -> bool:
    """Tells whether data is of a class of a package, or of one derived from it.

    Args:
        data: anything.
        package: the first part of the name of the class's module, such as `"torch"`.
        *names: names of classes there.
    """
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == package
        for kind in type(data).__mro__
    )


def is_tf_dataset(data: Any) -> bool:
    """Tells whether this is a `tf.data.Dataset`."""
    return is_a(data, "tensorflow", "DatasetV2")


def is_tensor(data: Any) -> bool:
    """Tells whether this is what numpy makes an array of: one of a framework, or of pandas."""
    return hasattr(data, "__array__") and not is_a(data, "tensorflow", "RaggedTensor")
