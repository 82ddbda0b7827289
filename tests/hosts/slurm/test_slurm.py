"""examples/jobs/slurm_*.sh, submitted to a Slurm cluster of two nodes."""

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from namespaces import MPICH as MPICH_SETTINGS
from start_jobs import BARE, is_alive, lean, pids, wait_for

JOBS = Path(__file__).parents[3] / "examples" / "jobs"
RELIABILITY = Path(__file__).parents[3] / "docs" / "reliability.md"
ACTIVATE = 'source "$HOME/keras_dist/bin/activate"'
SRUN, MPIRUN = JOBS / "slurm_srun.sh", JOBS / "slurm_mpirun.sh"
MPICH = Path(sys.executable)

pytestmark = pytest.mark.slow

# What a rank is, as it says itself.
ABOUT = """
import json, os, pathlib, time
import keras_dist

keras_dist.init()
rank = keras_dist.rank()
pathlib.Path(f"pid-{os.getpid()}").touch()
about = dict(rank=rank, size=keras_dist.size(), local_rank=keras_dist.local_rank(),
             node=os.uname().nodename, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
             restarts=os.environ.get("SLURM_RESTART_COUNT", "0"))
print("about " + json.dumps(about), flush=True)
"""
# Without a framework.
MEET = f"""{BARE}{ABOUT}
keras_dist.barrier()
print("has met all", flush=True)
"""

# Waits to be ended, as a training does that takes long.
STAY = f"""{MEET}
pathlib.Path(f"trains-{{rank}}").touch()
time.sleep(600)
print("trained", flush=True)
"""

# Trains with a backup. With a file `slow` it trains until it is interrupted.
TRAIN = """
import keras, numpy as np

keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model.compile(optimizer=keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
x = np.random.default_rng(1).normal(size=(64, 6)).astype("float32")
data = keras_dist.data.shard((x, x.sum(1, keepdims=True)), batch_size=4, seed=5)

class Pace(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        pathlib.Path(f"trains-{rank}").touch()
        if os.path.exists("slow") and about["restarts"] == "0":
            time.sleep(6)

pace = Pace()
callbacks = [*keras_dist.callbacks(), keras_dist.callbacks.BackupAndRestore("backup"), pace]
model.fit(data, epochs=12, verbose=0, callbacks=callbacks)
if rank == 0:
    np.savez("weights.npz", *model.get_weights())
print(f"trained {pace.steps} steps", flush=True)
"""
STEPS = 12 * 4


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Args:
        number: its number in Slurm.
        folder: its directory.
        again: submits it in another directory, and returns that job.
    """

    number: int
    folder: Path
    again: Callable[[Path], "Job"]


@pytest.fixture
def submit(cluster, open_mpi, tmp_path):
    """A function that submits a script of examples/jobs with the ranks of a small cluster."""
    home = tmp_path / "home"
    installed = home / "keras_dist" / "bin"
    installed.mkdir(parents=True)
    # .venv-openmpi uses the packages of .venv, and has no scripts of its own.
    (installed / "keras-dist").write_text('#!/bin/sh\nexec python -m keras_dist.launch.cli "$@"\n')
    (installed / "keras-dist").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "module").write_text("#!/bin/sh\n")  # a command of clusters
    (tmp_path / "bin" / "module").chmod(0o755)

    def submit(
        script, folder, *options, python=open_mpi, program=ABOUT + TRAIN, train_slowly=False
    ):
        (installed / "activate").write_text(f'PATH="{installed}:{python.parent}:$PATH"\n')
        folder.mkdir()
        if train_slowly:
            (folder / "slow").touch()
        (folder / "train.py").write_text(program)
        given = lean(KERAS_BACKEND="jax", OMP_NUM_THREADS="1", **MPICH_SETTINGS)
        given |= {"HOME": str(home), "PATH": f"{tmp_path / 'bin'}:{given['PATH']}"}
        size = ["--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2"]
        where = [f"--chdir={folder}", f"--output={folder / 'output'}"]
        number = cluster.submit(script, *size, *where, *options, **given)
        how = {"python": python, "program": program, "train_slowly": train_slowly}
        again = functools.partial(submit, script, **how)
        return Job(number, folder, lambda folder: again(folder, *options))

    return submit


def about(folder):
    """Returns what each rank printed about itself."""
    lines = re.findall(r"about (\{.*\})", (folder / "output").read_text())
    return sorted(map(json.loads, lines), key=lambda fields: (fields["restarts"], fields["rank"]))


def ranks(restarts="0", gpus="0,1"):
    """Returns what two ranks on each of two nodes print about themselves."""
    return [
        {
            "rank": rank,
            "size": 4,
            "local_rank": rank % 2,
            "node": f"host{1 + rank // 2}",
            "gpus": gpus,
            "restarts": restarts,
        }
        for rank in range(4)
    ]


def output(folder):
    return (folder / "output").read_text()


def started(folder):
    """Waits until the four ranks train, or stay."""
    assert wait_for(lambda: len(list(folder.glob("trains-*"))) == 4)


def weights(folder):
    with np.load(folder / "weights.npz") as arrays:
        return [arrays[name].tobytes() for name in arrays.files]


def complete(cluster, job, tries=3):
    """Waits for the end of a job that must succeed; returns it.

    Open MPI sometimes fails to start ranks on a machine with too few cores: then no rank has
    printed anything about itself, and the job is submitted again.
    """
    states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    ended = cluster.wait(job.number, *states)
    started = [fields for fields in about(job.folder) if fields["restarts"] == ended["Restarts"]]
    if ended["JobState"] == "FAILED" and not started and tries > 1:
        folder = job.folder.with_name(f"{job.folder.name}-again")
        return complete(cluster, job.again(folder), tries - 1)
    assert ended["JobState"] == "COMPLETED", output(job.folder)
    return job


def test_srun_starts_the_ranks_with_their_gpus(cluster, submit, tmp_path):
    folder = complete(cluster, submit(SRUN, tmp_path / "job", program=MEET)).folder
    assert about(folder) == ranks()
    assert output(folder).count("has met all") == 4


def script_of_the_page():
    """Returns the script of docs/reliability.md, which starts `keras-dist run`, for four ranks."""
    (text,) = re.findall(r"```sh\n(#!.*?)```", RELIABILITY.read_text(), re.DOTALL)
    assert "--signal=B:USR1@120" in text
    return text.replace("-np 8", "-np 4").replace("\n\n", f"\n\n{ACTIVATE}\n", 1)


def test_jobs_at_their_time_limit_are_requeued_and_end_alike(cluster, submit, tmp_path):
    script = tmp_path / "page.sh"
    script.write_text(script_of_the_page())
    interrupted = [
        submit(script, tmp_path / name, "--time=60", "--nodes=2", train_slowly=True)
        for script, name in ((SRUN, "srun"), (script, "page"))
    ]
    for job in interrupted:
        started(job.folder)
        # The signal comes 120 to 150 s before the limit, which is set once the ranks train: now.
        cluster.limit(job.number, 2)
    for job in interrupted:
        assert wait_for(lambda job=job: cluster.job(job.number)["Restarts"] == "1")
        cluster.limit(job.number, 60)
    found_weights = []
    for submitted in interrupted:
        job = complete(cluster, submitted)
        folder = job.folder
        assert cluster.job(job.number)["Restarts"] == "1"
        # The jobs run side by side, on different GPUs.
        found = [{**fields, "gpus": None} for fields in about(folder)]
        assert found == ranks("0", gpus=None) + ranks("1", gpus=None)
        steps = [int(steps) for steps in re.findall(r"trained (\d+) steps", output(folder))]
        assert len(steps) == 4
        assert len(set(steps)) == 1
        assert 0 < steps[0] < STEPS
        found_weights.append(weights(folder))
    # Each was interrupted when its signal came. Tests of signals compare with a whole training.
    assert found_weights[0] == found_weights[1]


def test_keras_dist_run_starts_the_ranks_of_the_allocation(
    cluster, submit, tmp_path, python_of_library
):
    how = {"python": python_of_library, "program": MEET}
    job = complete(cluster, submit(MPIRUN, tmp_path / "job", **how))
    assert about(job.folder) == ranks()
    folder = job.folder / "logs" / str(job.number)
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert all("has met all" in log for log in logs)


def end_by_scancel(cluster, job):
    """Cancels a job whose ranks have started, and checks that they end."""
    cluster.run("scancel", job.number)
    cluster.wait(job.number, "CANCELLED")
    ranks_of_job = pids(job.folder)
    assert len(ranks_of_job) == 4
    assert wait_for(lambda: not any(map(is_alive, ranks_of_job)))
    assert "trained" not in output(job.folder)


def test_scancel_ends_every_rank_of_keras_dist_run(cluster, submit, tmp_path):
    job = submit(MPIRUN, tmp_path / "job", program=STAY)
    started(job.folder)
    end_by_scancel(cluster, job)


def test_top_shows_the_job_and_scancel_ends_every_rank(cluster, submit, tmp_path):
    job = submit(SRUN, tmp_path / "job", train_slowly=True)
    started(job.folder)
    ranks_in_fit = []

    def shown():
        """Returns whether `top` shows four ranks in `fit`."""
        lines = cluster.run(
            MPICH.with_name("keras-dist"), "top", "--once", "--json", **lean()
        ).splitlines()
        jobs = [json.loads(line) for line in lines if line.startswith("{")]
        ranks_in_fit[:] = [
            (rank["rank"], rank["host"])
            for job in jobs
            for rank in job["ranks"]
            if rank["state"] == "fit"
        ]
        return len(ranks_in_fit) == 4

    assert wait_for(shown)
    end_by_scancel(cluster, job)
    assert ranks_in_fit == [(0, "host1"), (1, "host1"), (2, "host2"), (3, "host2")]
