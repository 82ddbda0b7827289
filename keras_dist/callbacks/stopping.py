"""All ranks stop after the same step: when a callback decides so, or a signal has come."""

import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras, model_of, module_of
from keras_dist.callbacks.root import overrides, unwrapped
from keras_dist.runtime.exit_hooks import PREEMPTED_EXIT_CODE
from keras_dist.runtime.signals import Signals
from keras_dist.training.fit_session import STOPS_JOB, Compute, Logs, Order, is_stopped
from keras_dist.training.rank_exchanges import allgather_object, allreduce
from keras_dist.training.rounds import Rounds
from keras_dist.training.rounds_in_fit import rounds_of
from keras_dist.training.session_callback import SessionCallback

BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")

_log = logging.getLogger("keras_dist")


class AgreeOnStoppingCallback(SessionCallback):
    """Stops all ranks if `model.stop_training` is set on any rank.

    The callback must follow all callbacks that may stop training. `keras_dist.callbacks()` puts it
    there, and `fit` moves it behind callbacks that are appended to that list. The ranks agree at
    the beginning and end of every epoch, and with `each_batch` after every batch, which costs a
    collective per step. Without agreement, the remaining ranks fail when a rank stops alone.

    Collective: every rank must pass the callback to `fit`.

    Args:
        each_batch: whether the ranks also agree after every batch. On JAX and torch Keras then
            calls all callbacks in the training thread, between the steps. Defaults to `False`.

    Raises:
        MismatchError: `each_batch` differs between the ranks; raised on every rank, by `fit`.
    """

    order = Order.STOPS

    def __init__(self, each_batch: bool = False):
        super().__init__()
        self.each_batch = each_batch
        self._waits = False  # for the end of a round of local steps, to stop
        self._rounds: list[Rounds] = []
        self._agree_at_batches(each_batch)

    def asks(self, appended: Sequence[keras.callbacks.Callback]) -> tuple[bool, bool]:
        """Returns whether to agree after every batch, as made and because of appended callbacks."""
        return self.each_batch, may_stop_at_a_batch(appended)

    def told(self, answers: Sequence[tuple[bool, bool]]) -> None:
        """Agrees after every batch of this fit if any rank asks for it."""
        as_made, appended = zip(*answers, strict=True)
        if len(set(as_made)) > 1:
            ranks = ", ".join(str(rank) for rank, each in enumerate(as_made) if each)
            raise errors.MismatchError(
                "callbacks that may stop at a batch on every rank or on none",
                f"some on ranks {ranks} of {len(answers)} alone",
                "Pass the same callbacks on every rank. Wrap a callback that acts on one rank "
                "in keras_dist.callbacks.RootOnly.",
            )
        self._agree_at_batches(self.each_batch or any(appended))

    def _agree_at_batches(self, agrees: bool) -> None:
        # On the instance, only if needed: the presence of this hook makes Keras call the hooks of
        # all callbacks in the training thread, the only thread that may run collectives.
        if agrees:
            self.on_train_batch_end = self._agree_at_batch
        else:
            self.__dict__.pop("on_train_batch_end", None)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees on a stop; Keras then stops after the first batch."""
        self._rounds = list(rounds_of(model_of(self)).values())
        self._waits = False  # of an earlier `fit`, which has raised
        self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree()

    def _agree_at_batch(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        model = model_of(self)
        if not any(rounds.is_within for rounds in self._rounds):
            self._agree()
        elif is_stopped(model):  # the others cannot know before they meet
            self._waits, model.stop_training = True, False

    def _agree(self) -> None:
        model, comm = model_of(self), runtime.fit_communicator()
        stopped, name = (
            np.array([is_stopped(model) or self._waits], np.uint8),
            "the decision to stop",
        )
        self._waits = False
        (any_rank,) = allreduce(comm, [stopped], [name], _engine.ReduceOp.MAX)
        if any_rank[0]:
            model.stop_training = True


def may_stop_at_a_batch(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Returns whether a callback has a batch hook of a user, or that of `TerminateOnNaN`."""
    inner = [unwrapped(callback)[0] for callback in callbacks]
    hooks = [(each, hook) for each in inner for hook in BATCH_HOOKS if overrides(each, hook)]
    return any(_may_stop(getattr(each, hook)) for each, hook in hooks)


def _may_stop(hook: Any) -> bool:
    # The module of the hook, not of the class: a user's class may inherit a hook of Keras.
    module = module_of(hook)
    known = is_part_of_keras(hook) or module.startswith("keras_dist.")
    return not known or module == keras.callbacks.TerminateOnNaN.__module__


class PreemptionCallback(SessionCallback):
    """Ends the job with a backup when any rank receives SIGTERM or SIGUSR1 during `fit`.

    Batch systems send these signals before they reclaim nodes, and `keras-dist run` sends SIGUSR1
    when the hosts have changed, and starts the job again; a fit without backups then goes on. All
    ranks finish the step, write a backup through `BackupAndRestore` and raise `SystemExit` with
    exit code 75 (EX_TEMPFAIL). The restarted job resumes after that step. The root logs the signal,
    its rank and the backup. A signal of a batch system more than two seconds after the first ends
    its rank at once, and with it the job.

    Signals travel with the reduction of gradients, without overhead. The ranks also exchange them
    at the beginning and end of every epoch, and stop there if a signal arrives during validation
    or no optimizer reduces over all ranks. With `steps_per_execution` they stop at the end of an
    execution.

    The callback does not replace signal handlers of the script. It handles no signals if `fit`
    does not run in the main thread, or if no optimizer is distributed. In a `fit` within another
    one, the callback of the outer one handles them.

    The callback must be the last of the list; `keras_dist.callbacks()` puts it there.

    Collective: every rank must pass the callback to `fit`.

    Args:
        backups: callbacks that write the backup. Defaults to `None`: those of the list.
        root_rank: rank that logs the preemption. Defaults to 0.

    Raises:
        SystemExit: a rank received a signal; raised on every rank, by `fit`.
    """

    order = Order.LEAVES

    def __init__(self, backups: Sequence[Any] | None = None, root_rank: int = 0):
        super().__init__()
        self.backups = backups
        self.root_rank = root_rank
        self._received: list[str] = []
        self._acts = self._listens = True
        self._signals: Signals | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Installs the signal handlers, unless a fit around this one has."""
        self._received = []
        self._acts = not (_engine.progress.is_nested("fit") and _engine.piggyback.has_listener())
        if not self._acts:
            return
        # Of fits in several threads, that of the main thread, which has the signals.
        is_main = threading.current_thread() is threading.main_thread()
        self._listens = is_main or not _engine.piggyback.has_listener()
        if not self._listens:
            return
        _engine.piggyback.set_listener(self._receive)
        self._signals = Signals(self._announce, hosts=bool(self._writers()))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Exchanges signals, and prepares to exit after the steps of the epoch, without a hook."""
        if not self._acts:
            return
        self._ask()
        # All ranks are at the end of the steps when the logs have been computed.
        self.session.transform_logs(Logs.LEAVE, self._leave_if_asked)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._acts:
            self._ask()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the signal handlers."""
        if not self._acts or not self._listens:
            return
        _engine.piggyback.remove_listener(self._receive)
        if self._signals is not None:
            self._signals.close()

    def _writers(self) -> Sequence[Any]:
        """Returns the callbacks that write the backup."""
        return self.session.backups if self.backups is None else self.backups

    def _announce(self, name: str) -> None:
        text = f"{name} on rank {runtime.rank()}"
        if runtime.fit_size() == 1:
            self._receive([text])
        else:
            _engine.piggyback.post(text)

    def _receive(self, texts: list[str]) -> None:
        # Called within the step, in any thread.
        self._received = texts
        if not model_of(self).stop_training:
            model_of(self).stop_training = STOPS_JOB

    def _ask(self) -> None:
        notice = _engine.piggyback.notice() if self._listens else None
        everyone = allgather_object(notice, "exchanging signals")
        self._received += [text for text in everyone if text is not None]
        if self._received:
            # The backup must include the effects of later callbacks in the current hook.
            self.session.after_hook(self._leave)

    def _leave_if_asked(self, logs: Any, _: Compute) -> Any:
        if self._received:
            self._leave()
        return logs

    def _leave(self) -> None:
        written = [str(backup.backup_dir) for backup in self._writers() if backup.save_now()]
        if runtime.rank() == self.root_rank:
            what = (
                f"A backup is in {', '.join(written)}. Start the job again to resume from it."
                if written
                else "No backup was written. Pass BackupAndRestore to keras_dist.callbacks; errors "
                "of a backup are logged above."
            )
            _log.warning(
                "keras_dist: %s: all %d ranks stop, %s. %s Exit code %d.",
                ", ".join(self._received),
                runtime.fit_size(),
                _engine.progress.describe_progress(runtime.fit_communicator().ranks),
                what,
                PREEMPTED_EXIT_CODE,
            )
        self.on_train_end()  # Keras does not call it
        sys.exit(PREEMPTED_EXIT_CODE)
