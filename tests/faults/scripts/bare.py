"""`runtime` without a framework: the engine suffices to test how a job starts, stalls and ends."""

from keras_dist import _backends, runtime

__all__ = ["runtime"]


class Nothing:
    """In place of the functions of a backend."""

    name = "nothing"

    def pin_device(*args: object) -> None: ...
    def gpu_number() -> None: ...  # type: ignore[misc]
    def limit_threads(*args: object, **kwargs: object) -> None: ...
    def finish_calls() -> None: ...  # type: ignore[misc]


_backends.active = lambda: Nothing  # type: ignore
