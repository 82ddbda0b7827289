"""The discovery script names another slot while the job runs: a process joins there."""

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import launcher, lean
from namespaces import TOLD, hosts_or_skip
from test_lost_hosts import launcher_command, wait_for

# Training ends two epochs after there are three ranks.
SCRIPT = """
import os, pathlib, time
import keras, numpy as np, keras_dist
keras_dist.init()
folder = pathlib.Path(os.environ["FAULT_FOLDER"])
x = np.arange(96, dtype="float32")[:, None]
class Grown(keras.callbacks.Callback):
    full = 0
    def on_train_batch_end(self, batch, logs=None):
        (folder / "trains").touch()
        time.sleep(0.02 if keras_dist.size() == 3 else 0.2)
    def on_epoch_end(self, epoch, logs=None):
        self.full += keras_dist.size() == 3
        self.model.stop_training = self.full == 2
    def state_dict(self):
        return {"full": self.full}
    def load_state_dict(self, state):
        self.full = state["full"]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
data = keras_dist.data.shard((x, x), batch_size=4)
model.fit(data, epochs=1000, verbose=0, callbacks=keras_dist.callbacks(Grown()))
keras_dist.verify_replicas(model)
hosts = keras_dist.allgather_object(os.uname().nodename)
if keras_dist.rank() == 0:
    print("ended on", *hosts)
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs the job, with another answer of the script once it trains."""
    if len(launcher()) > 1:
        pytest.skip("processes join with MPICH only")
    (tmp_path / "train.py").write_text(SCRIPT)
    answer = tmp_path / "answer"
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {answer}\n")
    script.chmod(0o755)

    def call(command, first, then, enter=(), **variables):
        answer.write_text(first)
        words = ["--host-discovery-script", script, "--max-np", "3"]
        words += ["--join-directory", tmp_path / "job", tmp_path / "train.py"]
        with (
            subprocess.Popen(
                [*map(str, (*enter, *command, *words))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=lean(KERAS_BACKEND="jax", FAULT_FOLDER=str(tmp_path), **variables),
            ) as job,
            ThreadPoolExecutor(1) as pool,
        ):
            output = pool.submit(job.communicate, timeout=180)
            try:
                wait_for(lambda: (tmp_path / "trains").exists() or output.done(), 90)
                answer.write_text(then)
                printed, _ = output.result()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    job.kill()
        assert job.returncode == 0, printed
        assert "1 rank has joined" in printed, printed
        return printed

    return call


@pytest.mark.slow
def test_a_process_joins_on_a_further_slot_of_this_host(run):
    command = [sys.executable, "-m", "keras_dist.launch.cli", "run"]
    printed = run(command, "localhost:2\n", "localhost:4\n")
    assert printed.count("started a process on localhost") == 1  # --max-np 3
    assert "ended on" in printed


@pytest.mark.slow
def test_a_process_joins_on_another_host(run, tmp_path):
    with hosts_or_skip(2) as (hosts, reach):
        command, settings = launcher_command(Path(sys.executable), hosts, reach, tmp_path / "bin")
        command = command[: command.index("--hosts")]
        how = {"enter": hosts[0].enter, TOLD: "1", **settings}
        try:
            printed = run(command, "host1:2\n", "host1:2\nhost2:1\n", **how)
        finally:
            for host in hosts:
                host.kill_all()
    assert "ended on host1 host1 host2" in printed
