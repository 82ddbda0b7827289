"""The hosts change while a job trains: it starts again on those that there are, and goes on."""

import functools
import re

import numpy as np
import pytest
from endings import SCRIPTS, all_gone, discovery_script, end_after
from namespaces import TOLD, hosts_or_skip
from start_jobs import lean
from test_lost_hosts import launcher_command

GOES_ON = (
    "all ranks stop after the same step; the job starts again at once on these hosts, from memory, "
    "without counting a restart"
)


# Which library starts the ranks is independent of what they do: each case has one of the two.
ON_MPICH = pytest.mark.parametrize("python_of_library", ["mpich"], indirect=True)
ON_OPEN_MPI = pytest.mark.parametrize("python_of_library", ["openmpi"], indirect=True)


@pytest.fixture
def change(python_of_library, tmp_path):
    """A function that runs a program whose hosts change while it trains; returns its output."""
    script, answer = discovery_script(tmp_path, "")

    def run(first, then, *words, options=(), code=0, backend="torch"):
        answer.write_text(first)
        command = [python_of_library, "-m", "keras_dist.launch.cli", "run"]
        command += options or ["--host-discovery-script", script, "--min-np", 2]
        command += [SCRIPTS / "other_hosts.py", *words]
        environment = lean(
            KERAS_BACKEND=backend,
            FAULT_FOLDER=str(tmp_path),
            KERAS_DIST_MEMORY_DIRECTORY=str(tmp_path),
        )
        act = functools.partial(answer.write_text, then)
        ended, printed = end_after(act, tmp_path / "trains", command, environment)
        assert ended == code
        all_gone(tmp_path, printed)
        return printed

    run.answer = answer
    return run


def weights():
    """Returns the weights after 32 steps on batches of 12."""
    x = np.random.default_rng(0).standard_normal((48, 6))
    found, velocity = np.zeros(6), np.zeros(6)
    for step in range(32):
        batch = x[step % 4 * 12 :][:12]
        gradient = 2 * batch.T @ (batch @ found - batch[:, 0]) / 12
        velocity = 0.9 * velocity - 0.1 * gradient
        found = found + velocity
    return found


def check_fit(tmp_path, sizes):
    """Checks that each step was done once, and the weights."""
    lines = (tmp_path / "steps").read_text().splitlines()
    assert [int(line.partition(":")[0]) for line in lines] == sizes
    steps = [int(n) for line in lines for n in re.findall(r"\d+", line.partition(":")[2])]
    assert steps == list(range(32))
    assert np.allclose(np.load(tmp_path / "weights.npy")[:, 0], weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python_of_library", "first", "then", "backup"),
    [
        ("mpich", 2, 3, "memory"),
        ("openmpi", 3, 2, "parts"),
        ("mpich", 3, 2, "disk"),
    ],
    indirect=["python_of_library"],
)
@pytest.mark.fault(
    "the discovery script names more or fewer slots while a `fit` with a backup runs, with "
    "`--min-np`",
    f"{GOES_ON}; each step is done once, and the weights are those of one process",
    within=90,
)
def test_a_fit_goes_on(change, tmp_path, first, then, backup):
    printed = change(f"localhost:{first}\n", f"localhost:{then}\n", "fit", backup)
    assert f"the hosts are localhost:{then} now" in printed
    assert "SIGUSR1 on rank " in printed and "Restart" not in printed
    check_fit(tmp_path, [first, then])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python_of_library", "first", "then"),
    [
        ("mpich", "host1:2\n", "host1:2\nhost2:1\n"),
        ("openmpi", "host1:1\nhost2:1\n", "host2:2\n"),
    ],
    indirect=["python_of_library"],
)
def test_a_fit_goes_on_other_hosts_from_the_memory_of_one(python_of_library, tmp_path, first, then):
    script, answer = discovery_script(tmp_path, first)
    with hosts_or_skip(2) as (hosts, reach):
        made, settings = launcher_command(python_of_library, hosts, reach, tmp_path / "bin")
        command = [*hosts[0].enter, *made[: made.index("--hosts")], "--host-discovery-script"]
        command += [script, "--min-np", 2, SCRIPTS / "other_hosts.py", "fit", "memory"]
        settings |= {"BACKUP": "/dev/shm/disk-of-this-host", TOLD: "1", "KERAS_BACKEND": "torch"}
        environment = lean(FAULT_FOLDER=str(tmp_path), **settings)
        act = functools.partial(answer.write_text, then)
        code, _ = end_after(act, tmp_path / "trains", command, environment, hosts)
    assert code == 0
    check_fit(tmp_path, [2, 3] if "host1:2" in first else [2, 2])


@ON_MPICH
@pytest.mark.slow
def test_a_fit_without_a_backup_is_not_stopped(change, tmp_path):
    printed = change("localhost:2\n", "localhost:3\n", "fit", "none")
    assert printed.count("the hosts are localhost:3 now") == 1
    check_fit(tmp_path, [2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python_of_library", "first", "then", "how"),
    [
        ("mpich", 2, 3, "memory"),
        ("openmpi", 3, 2, "checks"),
        ("mpich", 2, 3, "directory"),
    ],
    indirect=["python_of_library"],
)
@pytest.mark.fault(
    "the discovery script names more or fewer slots while a function of `elastic.run` runs, with "
    "`--min-np`",
    "all ranks stop after the same commit; the job starts again at once on these hosts, from that "
    "commit, and calls the reset callbacks",
    within=60,
)
def test_an_elastic_function_goes_on(change, first, then, how):
    printed = change(f"localhost:{first}\n", f"localhost:{then}\n", "commits", how)
    assert f"sizes {first} {then}" in printed
    assert f"all {first} ranks stop after a commit." in printed


@ON_OPEN_MPI
@pytest.mark.slow
def test_a_fit_that_commits_goes_on(change):
    printed = change("localhost:2\n", "localhost:3\n", "elastic_fit")
    assert "sizes 3" in printed and "all 2 ranks stop after a commit." in printed


@ON_MPICH
@pytest.mark.slow
def test_a_changed_hostfile_is_read_again(change):
    options = ["--hostfile", change.answer, "--max-np", 3]
    printed = change("localhost:2\n", "localhost:4\n", "commits", "memory", options=options)
    assert "sizes 2 3" in printed


@ON_OPEN_MPI
@pytest.mark.slow
def test_a_script_that_fails_while_the_job_runs_is_named_once(change):
    printed = change("localhost:2\n", "localhost:2x\n", "commits", "memory")
    assert "sizes 2" in printed
    told = "names no hosts while the job runs: 'localhost:2x'."
    assert printed.count(told) == 1
