"""Programs that fail once the processes of their next start have imported what they need."""

import os
import pathlib
import pickle
import sys
import time

AHEAD = {"numpy", "keras"} & set(sys.modules)
STARTED_AS = (__name__, list(sys.argv), sys.path[0])

from faults import FOLDER, die, fault, run, tell  # noqa: E402

from keras_dist import _engine  # noqa: E402

RESTART = int(os.environ["KERAS_DIST_RESTART"])


def of_next_start() -> list[str]:
    """Returns the processes of the next start of the job that have imported numpy."""
    wanted = {f"KERAS_DIST_RESTART={RESTART + 1}", f"FAULT_FOLDER={FOLDER}"}
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if wanted <= set(variables) and "numpy" in (folder / "maps").read_text():
                found.append(folder.name)
        except OSError:
            pass
    return found


def wait_for_next_start(size: int) -> None:
    while len(of_next_start()) < size:
        time.sleep(0.1)


class Own:
    """A class of the script, which pickle finds in `__main__`."""


def die_twice(*words: str) -> None:
    from bare import runtime

    from keras_dist import ops

    runtime.init()
    _engine.progress.note_step(1)
    ops.barrier()
    own = type(pickle.loads(pickle.dumps(Own()))) is Own
    tell("start", RESTART, "ahead", sorted(AHEAD), *STARTED_AS, own, sys.flags.optimize)
    if RESTART < 2 and runtime.rank() == 1:
        wait_for_next_start(runtime.size())
        die()
    ops.barrier()


def wait(ends: str) -> None:
    """Waits until the launcher is told to end, or ends."""
    from bare import runtime

    from keras_dist import ops

    runtime.init()
    _engine.progress.note_step(1)
    ops.barrier()
    wait_for_next_start(runtime.size())
    fault()
    tell("ready")
    if ends != "ends":
        time.sleep(100)


def train(backup: str) -> None:
    os.environ["KERAS_BACKEND"] = "jax"  # not that of the environment
    import keras
    from fits import At, fit

    import keras_dist

    def die_once() -> None:
        if not RESTART:
            wait_for_next_start(keras_dist.size())
            die()

    steps = At({("batch end", 1, 0): die_once}, on=1)
    found = fit(keras_dist.callbacks.BackupAndRestore(backup, save_freq=1), steps, batch_size=4)
    assert keras.backend.backend() == "jax"
    tell("ahead", sorted(AHEAD), "steps", steps.steps)
    for one, other in zip(found.get_weights(), fit(batch_size=4).get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()
    tell("the bits of an uninterrupted fit")


run(globals())
