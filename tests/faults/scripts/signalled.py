"""A `fit` whose ranks receive signals of a batch system."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from faults import fault, run, send
from fits import At, build, rank, shard
from fits import fit as fit_model

from keras_dist.callbacks import BackupAndRestore

folder = Path(os.environ["FOLDER"])


def fit(*callbacks: Any, **options: Any) -> Any:
    """Trains on 6 batches an epoch, with random numbers."""
    model = build((16,), dropout=0.4)
    return fit_model(*callbacks, data=shard(), model=model, epochs=3, **options)


def strike(name: str) -> None:
    fault()
    send(name)
    time.sleep(0.5)  # for the thread that hears it


def once() -> None:
    at = At({("batch end", 1, 2): lambda: strike("SIGTERM")}, on=1)
    try:
        fit(at, BackupAndRestore(folder))
    finally:
        (folder.parent / f"steps-{rank}").write_text(json.dumps(at.steps))


def resumed(epoch: str, batch: str) -> None:
    at = At()
    found = fit(at, BackupAndRestore(folder))
    assert at.steps[0] == (int(epoch), int(batch) + 1), at.steps
    assert at.steps[-1] == (2, 5)
    expected = fit()
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()
    assert [v.numpy().tobytes() for v in found.optimizer.variables] == [
        v.numpy().tobytes() for v in expected.optimizer.variables
    ]
    assert not folder.exists()
    others()


def in_validation() -> None:
    at = At({("test end", 1): lambda: strike("SIGUSR1")})
    fit(at, BackupAndRestore(folder), validation_data=shard(shuffle=False))


def twice() -> None:
    def send_both() -> None:
        send("SIGTERM")
        time.sleep(2.5)
        fault()
        send("SIGTERM")

    def be_told() -> None:
        threading.Thread(target=send_both).start()
        time.sleep(1000)

    fit(At({("batch end", 1, 2): be_told}, on=1))


def others() -> None:
    """One that the script handles itself, and one that a forked child gets."""
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append(rank))

    def send_others() -> None:
        fault()
        send("SIGUSR1")
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM

    at = At({("batch end", 1, 2): send_others}, on=1)
    fit(at)
    assert came == [1] * rank and len(at.steps) == 18
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


run(globals())
