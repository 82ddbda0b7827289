"""`keras_dist.elastic`: a state survives the loss of ranks, in place and after a restart."""

import subprocess
import sys

import pytest
from jobs import lean

IN_PLACE = """
import signal
import numpy as np
from keras_dist import ops, elastic
runtime.init()
me = runtime.rank()
resets = []
state = elastic.ObjectState(step=0, total=0.0, seen=[])
state.register_reset_callbacks([lambda: resets.append(runtime.size())])

@elastic.run
def train(state):
    state.seen.append(runtime.size())
    while state.step < 6:
        if me == 1 and state.step == 3:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(ops.allreduce(1.0, op="sum"))
        state.step += 1
        state.commit()
    return "done"

if me == 2:
    state.step = 5  # the root's counts
assert train(state) == "done"
assert (state.step, state.total, state.seen, resets) == (6, 3 * 3 + 3 * 2, [3, 2], [2]), vars(state)
state.step, state.total = 99, -1.0
state.restore()
assert (state.step, state.total) == (6, 15.0)
"""


@pytest.mark.fault(
    "a rank is killed in a function of `elastic.run`, under Open MPI's ULFM",
    "the remaining ranks finish the step, are notified at the next commit, and continue with "
    "equal state",
    within=20,
)
def test_an_elastic_training_goes_on(job, open_mpi):
    options = ("--with-ft", "ulfm")
    ended = job(3, IN_PLACE, bare=True, python=open_mpi, options=options)
    assert ended.returncode == 0, ended.stdout


KEPT = """
import os, resource
import keras_dist
from keras_dist import elastic, errors
from keras_dist.storage import versioned_backups
keras_dist.init()
root = keras_dist.rank() == 0
folder = pathlib.Path(os.environ["FOLDER"])
def started_anew():
    state = elastic.ObjectState(directory=folder, epoch=0)
    state.sync()
    return state
def damage(paths):
    if root:
        for path in paths:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
    keras_dist.barrier()
state = started_anew()
for state.epoch in (1, 2):
    state.commit()
fault()
"""


@pytest.mark.fault(
    "the newest file of an elastic state is damaged; then all are",
    "training resumes from the previous one, with a warning; then an error on every rank",
    within=30,
)
def test_a_damaged_state_is_noticed(job, tmp_path):
    text = f"""{KEPT}
whole = versioned_backups.newest_first(folder)[1]
keras_dist.barrier()
damage(versioned_backups.newest_first(folder)[:1])
state = started_anew()
assert state.epoch == 1
state.commit()
assert whole in versioned_backups.newest_first(folder)
keras_dist.barrier()
damage(versioned_backups.newest_first(folder))
try:
    started_anew()
    raise SystemExit("not found")
except errors.CheckpointError as error:
    assert "an intact backup in" in str(error), error
    assert "Remove the backup to start over." in str(error), error
"""
    ended = job(2, text, FOLDER=str(tmp_path / "state"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("is damaged: the digest does not match.") == 1


@pytest.mark.fault(
    "the disk is full while an elastic state is committed, then its directory is removed",
    "training continues with a warning each time; earlier files stay, and no partial file is left",
    within=30,
)
def test_a_commit_without_room(job, tmp_path):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    text = f"""{KEPT}
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
def names():
    return {{path.name for path in folder.iterdir()}}
before = names()
keras_dist.barrier()
limit(100)
for state.epoch in (3, 4):
    state.commit()
limit(resource.RLIM_INFINITY)
state.epoch = 9
state.restore()  # memory has room
assert state.epoch == 4
assert names() == before and len(before) == 2, (before, names())
assert started_anew().epoch == 2
state.epoch = 5
state.commit()
assert started_anew().epoch == 5 and len(names()) == 2
keras_dist.barrier()
if root:
    folder.rename(folder.with_name("lost"))
    folder.write_text("")
state.commit()
try:
    elastic.ObjectState(directory=folder / "no", epoch=0).commit()
    raise SystemExit("not found")
except errors.CheckpointError as error:
    assert "Make room on its disk, or name another directory." in str(error), error
"""
    ended = job(2, text, FOLDER=str(tmp_path / "state"), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "Training continues" in line]
    assert ["File too large" in line for line in lines] == [True, True, False], ended.stdout


RESTARTED = """
import os
import keras_dist
from keras_dist import elastic
keras_dist.init()
state = elastic.ObjectState(directory={directory!r}, step=0, sizes=[])
first = os.environ["KERAS_DIST_RESTART"] == "0"

@elastic.run
def train(state):
    while state.step < 4:
        keras_dist.allreduce(1.0)
        state.sizes.append(keras_dist.size())
        state.step += 1
        if first and state.step == 3:
            raise RuntimeError("no more")
        state.commit()

train(state)
assert (state.step, state.sizes) == (4, [1, 1, 2, 2]), vars(state)  # one step was not committed
"""


def test_a_restart_takes_the_hosts_that_there_are_then(tmp_path):
    answers, script = tmp_path / "answers", tmp_path / "hosts.sh"
    answers.write_text("localhost:1\nlocalhost:2\n")
    # Each run prints the next line.
    script.write_text('#!/bin/sh\nhead -n 1 "$1" && sed -i 1d "$1"\n')
    script.chmod(0o755)
    asks = ["--host-discovery-script", f"{script} {answers}"]
    train = tmp_path / "train.py"
    train.write_text(RESTARTED.format(directory=str(tmp_path / "state")))
    command = [sys.executable, "-m", "keras_dist.launch.cli", "run", "--max-restarts", "1"]
    command += [*asks, "--min-np", "1", "--max-np", "4", str(train)]
    ended = subprocess.run(
        command,
        env=lean(KERAS_BACKEND="jax"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("RuntimeError: no more") == 1
