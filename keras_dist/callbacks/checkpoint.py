"""Model checkpoints: the root writes each file atomically, at once or in a background thread."""

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent import futures
from typing import Any, BinaryIO

import keras

from keras_dist import errors, runtime
from keras_dist._compat.keras.callbacks import KerasCheckpoint
from keras_dist.callbacks.verification import verify_before_writing
from keras_dist.resume.stores import NEEDS_ROOM
from keras_dist.storage.atomic_write import beside, move
from keras_dist.storage.root_action import RetryPolicy, on_root
from keras_dist.training.model_state import state
from keras_dist.training.session_callback import SessionCallback
from keras_dist.training.sharded_state import gathered, whole_nbytes

HDF5 = ".h5"
COPY_NBYTES = 2**23
# Upper bound of the metadata that HDF5 writes per file and per variable.
HDF5_NBYTES = 8192

Save = Callable[[str], None]


class ModelCheckpoint(SessionCallback, KerasCheckpoint):
    """Keras' `ModelCheckpoint` for distributed training: only the root writes.

    The root writes to a temporary file in the same directory and renames it. A reader never sees
    an incomplete file, and a crash leaves the previous checkpoint intact. All ranks wait until
    the file is written. If the disk is full, or any write fails after a first successful write,
    training continues, the root logs a warning and the previous checkpoint stays. A failure of
    the first write raises on all ranks. Moving statistics are averaged and the replicas verified
    before each write, see `VerifyReplicas`. A `.keras` file is a zip archive with checksums, from
    which `keras_dist.load_model` detects damage; other formats have no checksums.

    With `asynchronous=True` training continues while a file is written to slow storage: the root
    writes to the directory of temporary files (`TMPDIR`), and a background thread copies the file
    to `filepath`. Only one write is pending at a time: the next checkpoint and the end of `fit`
    wait for it.

    Collective: every rank must pass the callback to `fit`, with the same arguments.

    Args:
        filepath: local path that ends in `.keras`, `.h5` or `.weights.h5`; may contain format
            fields as in Keras.
        *args: see `keras.callbacks.ModelCheckpoint`.
        root_rank: rank that writes. Defaults to 0.
        asynchronous: whether training continues while a file is copied to `filepath`. With
            `verbose=1`, Keras' message that saving is finished then appears before the file does.
            Defaults to `False`.
        **kwargs: see `keras.callbacks.ModelCheckpoint`.

    Raises:
        CheckpointError: the first file cannot be written; raised on every rank, by `fit`, at the
            write, or with `asynchronous` at the next checkpoint or the end of training.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    checkpoint = keras_dist.callbacks.ModelCheckpoint("best.keras", save_best_only=True)
    model.fit(dataset, callbacks=keras_dist.callbacks(checkpoint))
    ```
    """

    best: float | None

    def __init__(
        self,
        filepath: str,
        *args: Any,
        root_rank: int = 0,
        asynchronous: bool = False,
        **kwargs: Any,
    ):
        super().__init__(filepath, *args, **kwargs)
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._writer = BackgroundWriter() if asynchronous else None
        self._retry_policy = RetryPolicy()
        if runtime.rank() != root_rank:
            self.verbose = 0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last checkpoint is written."""
        if self._writer is not None:
            self._on_root("the last checkpoint", self._wait, self.filepath)

    def _keras_dist_save(self, path: str, save: Callable[[], None]) -> None:
        verify_before_writing(self.model)
        work = functools.partial(self._save_atomically, path, save)
        with gathered(self.model, self.root_rank):
            self.best = self._on_root("a checkpoint", work, path)

    def _on_root(self, what: str, work: Callable[[], Any], path: str) -> Any:
        expected = f"to write the checkpoint {path}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, NEEDS_ROOM)

    def _wait(self) -> None:
        if self._writer is not None:
            with self._retry_policy.attempt("to write the previous checkpoint"):
                if self._writer.wait():
                    self._retry_policy.succeed()

    def _save_atomically(self, path: str, save: Callable[[], None]) -> float | None:
        """Lets Keras decide whether to write; returns the best monitored value so far."""
        self._wait()
        best = self.best
        with self._retry_policy.attempt(f"to write the checkpoint {path}"):
            if self._save(save):
                self._retry_policy.succeed()
            # Keras updates it before it writes: a failed write must not count.
            best = self.best
        return best

    def _save(self, save: Callable[[], None]) -> bool:
        """Returns whether a file was written to its final path."""
        model = self.model
        write = write_atomically if self._writer is None else self._writer.write
        saver = _Saver(model, write)
        self.set_model(saver)
        try:
            save()
        finally:
            self.set_model(model)
        return saver.has_saved and self._writer is None


class BestModelCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` with `save_best_only=True` and Horovod's arguments.

    Args:
        monitor: name of the metric to monitor. Defaults to `"val_loss"`.
        verbose: 1 prints a line per checkpoint, on the root. Defaults to 0.
        save_weights_only: whether to save weights rather than the model. Defaults to `False`.
        mode: `"min"`, `"max"` or `"auto"`. Defaults to `"auto"`.
        save_freq: `"epoch"` or a number of batches. Defaults to `"epoch"`.
        filepath: path of the file; the attribute may also be set later. Defaults to `None`:
            `best.keras`, or `best.weights.h5` with `save_weights_only`.
        **kwargs: see `ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
        **kwargs: Any,
    ):
        path = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(path, monitor, verbose, True, save_weights_only, mode, save_freq, **kwargs)


class _Saver:
    """Proxy of a model: passes the method and path that Keras saves with to `write`."""

    def __init__(self, model: keras.Model, write: Callable[..., None]):
        self._model, self._write_file = model, write
        self.has_saved = False

    def save(self, filepath: str, overwrite: bool = True) -> None:
        self._write(self._model.save, filepath)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        self._write(self._model.save_weights, filepath)

    def _write(self, save: Callable[[str], None], filepath: str) -> None:
        variables = state(self._model)
        nbytes = sum(whole_nbytes(variable) for variable in variables)
        self._write_file(save, filepath, nbytes + HDF5_NBYTES * (1 + len(variables)))
        self.has_saved = True


def write_atomically(save: Save, filepath: str, nbytes: int = 0) -> None:
    """Saves to a temporary file in the same directory, of about `nbytes` bytes, and renames it."""
    target = pathlib.Path(filepath)
    place = target.resolve()  # the file that a link names, as Keras writes it
    with beside(place.with_name(target.name)) as path:
        if target.suffix == HDF5:
            # An error if there is no space; the library would abort the process at the end.
            with path.open("xb") as file:
                if nbytes and hasattr(os, "posix_fallocate"):  # not available on macOS
                    os.posix_fallocate(file.fileno(), 0, nbytes)
        save(str(path))
        move(path, place)


class BackgroundWriter:
    """Writes files in a background thread, one at a time."""

    def __init__(self) -> None:
        self._pending: tuple[str, futures.Future[None]] | None = None

    def write(self, save: Save, filepath: str, nbytes: int = 0) -> None:
        """Serialises to a temporary file, which a thread copies. Call `wait` before the next."""
        directory = pathlib.Path(tempfile.gettempdir())
        with beside(directory / f"keras_dist-{pathlib.Path(filepath).name}") as local:
            write_atomically(save, str(local), nbytes)
            content = open(local, "rb")  # noqa: SIM115, the thread closes it
        # The temporary file is unlinked already: no file remains if this process is killed.
        thread = futures.ThreadPoolExecutor(1, "keras_dist checkpoint")
        self._pending = filepath, thread.submit(_copy_to, content, filepath)
        thread.shutdown(wait=False)

    def wait(self) -> bool:
        """Waits until the last file is written, or raises; returns whether one was pending."""
        if self._pending is None:
            return False
        (filepath, copied), self._pending = self._pending, None
        try:
            copied.result()
        except Exception as error:
            expected = f"to write the checkpoint {filepath}"
            received = f"{type(error).__name__}: {error}"
            raise errors.CheckpointError(expected, received, NEEDS_ROOM) from error
        return True


def _copy_to(content: BinaryIO, filepath: str) -> None:
    with content:
        write_atomically(functools.partial(_copy, content), filepath)


def _copy(content: BinaryIO, path: str) -> None:
    with open(path, "wb") as file:  # one of HDF5 exists, with its space
        shutil.copyfileobj(content, file, COPY_NBYTES)
