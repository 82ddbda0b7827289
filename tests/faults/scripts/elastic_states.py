"""Elastic states without a framework: ranks die, a job restarts, files are damaged, disks full."""

import os
from pathlib import Path
from typing import Any

from bare import runtime
from faults import die, expect, fault, flip, limit_files, run

from keras_dist import elastic, ops
from keras_dist.errors import CheckpointError
from keras_dist.resume.format import REMEDY, newest_first


def without_a_rank() -> None:
    runtime.init()
    me = runtime.rank()
    resets: list[int] = []
    state: Any = elastic.ObjectState(step=0, total=0.0, seen=[])
    state.register_reset_callbacks([lambda: resets.append(runtime.size())])

    @elastic.run
    def train(state: Any) -> str:
        state.seen.append(runtime.size())
        while state.step < 6:
            if me == 1 and state.step == 3:
                die()
            state.total += float(ops.allreduce(1.0, op="sum"))
            state.step += 1
            state.commit()
        return "done"

    if me == 2:
        state.step = 5  # the root's counts
    assert train(state) == "done"
    found = (state.step, state.total, state.seen, resets)
    assert found == (6, 3 * 3 + 3 * 2, [3, 2], [2]), found
    state.step, state.total = 99, -1.0
    state.restore()
    assert (state.step, state.total) == (6, 15.0)


def restarted(directory: str) -> None:
    """The first run of two fails; the second has another number of ranks."""
    runtime.init()
    state: Any = elastic.ObjectState(directory=directory, step=0, sizes=[])

    @elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            ops.allreduce(1.0)
            state.sizes.append(runtime.size())
            state.step += 1
            if os.environ["KERAS_DIST_RESTART"] == "0" and state.step == 3:
                raise RuntimeError("no more")
            state.commit()

    train(state)
    assert (state.step, state.sizes) == (4, [1, 1, 2, 2]), vars(state)  # one was not committed


def started_anew(folder: Path) -> Any:
    state = elastic.ObjectState(directory=folder, epoch=0)
    state.sync()
    return state


def damage(paths: list[Path]) -> None:
    for path in paths if runtime.rank() == 0 else ():
        flip(path)
    ops.barrier()


def committed(folder: Path) -> Any:
    """Returns a state that has been committed twice."""
    state = started_anew(folder)
    for state.epoch in (1, 2):
        state.commit()
    return state


def damaged(folder: Path) -> None:
    committed(folder)
    whole = newest_first(folder)[1]
    ops.barrier()
    damage(newest_first(folder)[:1])
    state = started_anew(folder)
    assert state.epoch == 1
    state.commit()
    assert whole in newest_first(folder)
    ops.barrier()
    damage(newest_first(folder))
    text = expect(CheckpointError, started_anew, folder)
    assert "an undamaged generation in" in text, text
    assert REMEDY in text, text


def no_room(folder: Path) -> None:
    state = committed(folder)

    def names() -> set[str]:
        return {path.name for path in folder.iterdir()}

    before = names()
    ops.barrier()
    limit_files(100)
    for state.epoch in (3, 4):
        state.commit()
    limit_files()
    state.epoch = 9
    state.restore()  # memory has room
    assert state.epoch == 4
    assert names() == before and len(before) == 4, (before, names())
    assert started_anew(folder).epoch == 2
    state.epoch = 5
    state.commit()
    assert started_anew(folder).epoch == 5 and len(names()) == 4
    ops.barrier()
    if runtime.rank() == 0:
        folder.rename(folder.with_name("lost"))
        folder.write_text("")
    ops.barrier()
    state.commit()
    nowhere = elastic.ObjectState(directory=folder / "no", epoch=0)
    text = expect(CheckpointError, nowhere.commit)
    assert "Make room on its disk, or name another directory." in text, text


def on_disks_that_fail(directory: str) -> None:
    runtime.init()
    fault()
    for fail in damaged, no_room:
        fail(Path(directory, fail.__name__))


run(globals())
