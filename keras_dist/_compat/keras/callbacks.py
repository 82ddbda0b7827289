"""Names of Keras: callbacks."""

from typing import Any

import keras

from keras_dist._compat.contract import Owner
from keras_dist._compat.keras.versions import release

# The attributes that hold the state of Keras' callbacks; other callbacks of Keras have none.
STATE_ATTRIBUTES = {
    "BackupAndRestore": ("_batches_seen_since_last_saving", "_last_batch_seen"),
    "EarlyStopping": ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen", "best"),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
}
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # of recent versions
    counters = ("_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen")
    STATE_ATTRIBUTES["OrbaxCheckpoint"] = (*counters, "best")


def model_of(callback: Any) -> Any:
    """Returns the model of a callback. On JAX, `callback.model` first copies the model's state."""
    return callback._model


def module_of(function: Any) -> str:
    """Returns the module that defines a function; the empty string if it is unknown."""
    return getattr(function, "__module__", None) or ""  # a `functools.partial` has none


def is_part_of_keras(function: Any) -> bool:
    """Returns whether Keras itself defines a function."""
    return module_of(function).startswith("keras.src.")


class KerasBackup(keras.callbacks.BackupAndRestore):
    """Keras' callback. Subclasses define `_keras_dist_save()`, which replaces Keras' writing."""

    @property
    def _keras_dist_epoch(self) -> int:
        """The epoch to resume: the current epoch, or the next after `on_epoch_end`."""
        epoch: int = self._current_epoch
        return epoch

    @_keras_dist_epoch.setter
    def _keras_dist_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def _save_model(self) -> None:
        self._keras_dist_save()

    def _keras_dist_save(self) -> None:
        raise NotImplementedError


class KerasCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' callback. Subclasses define `_keras_dist_save(path, save)`.

    It is called where Keras would write to `path`. `save()` does what Keras does; it writes nothing
    if `save_best_only` is set and the model is not the best.
    """

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        logs = logs or {}
        path = self._get_file_path(epoch, batch, logs)
        write = super()._save_model

        def save() -> None:
            if self.save_best_only and self.monitor_op is None:
                self._set_monitor_op()  # Keras sets it only at the end of the first epoch
            write(epoch, batch, logs)

        self._keras_dist_save(path, save)

    def _keras_dist_save(self, path: str, save: Any) -> None:
        raise NotImplementedError


BACKUP = Owner("keras:callbacks.BackupAndRestore")
CHECKPOINT = Owner("keras:callbacks.ModelCheckpoint")
LIST = Owner("keras:callbacks.CallbackList")
RESUMED = "a resumed fit would differ from an uninterrupted one"

CONTRACT = (
    Owner("keras:callbacks.Callback").attribute(
        "_model",
        "to access the model of a callback during a step",
        "each batch would copy the state of a JAX model",
    ),
    LIST.attribute("callbacks", "to find the other callbacks of a list", RESUMED),
    *(
        LIST.method(hook, "to run after all callbacks of a list", RESUMED)
        for hook in (
            "on_train_begin(logs)",
            "on_train_end(logs)",
            "on_epoch_begin(epoch, logs)",
            "on_epoch_end(epoch, logs)",
            "on_train_batch_begin(batch, logs)",
            "on_train_batch_end(batch, logs)",
        )
    ),
    BACKUP.method(
        "_save_model()",
        "to write a backup on the root only",
        "every rank would write, in the format of Keras",
    ),
    BACKUP.attribute("_current_epoch", "to record the epoch of a backup", RESUMED),
    CHECKPOINT.method(
        "_save_model(epoch, batch, logs)",
        "to write a checkpoint on the root only",
        "every rank would write",
    ),
    CHECKPOINT.method(
        "_get_file_path(epoch, batch, logs)",
        "to name the checkpoint in messages",
        "checkpoints could not be written",
    ),
    CHECKPOINT.method(
        "_set_monitor_op()",
        "to decide within an epoch which model is the best",
        "save_best_only with a number as save_freq would fail",
        applies=lambda: release() >= (3, 11),  # earlier versions set it in the constructor
    ),
    *(
        Owner("keras:callbacks.CSVLogger").attribute(
            name, "to append to the file in a resumed fit", RESUMED
        )
        for name in ("append", "append_header", "filename", "keys")
    ),
    *(
        Owner(f"keras:callbacks.{kind}").attribute(
            name, "to include the state of a callback in a backup", RESUMED
        )
        for kind, names in STATE_ATTRIBUTES.items()
        for name in names
    ),
)
