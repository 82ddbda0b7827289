"""A host is lost whole: the job goes on from a backup in the memory of another host."""

import contextlib
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from endings import SCRIPTS, discovery_script, end_after
from namespaces import TOLD, hosts_or_skip
from start_jobs import lean
from test_lost_hosts import launcher_command


@pytest.fixture
def weights_of(request, tmp_path):
    """A function that trains on two hosts, one of which may be lost, and returns the weights."""
    mark = request.node.get_closest_marker("fault")
    within = mark.kwargs["within"] if mark else 120

    def run(loses, script, *words):
        folder = tmp_path / str(loses)
        folder.mkdir()
        discovers, answer = discovery_script(folder, "host1:1\nhost2:1\n")
        with hosts_or_skip(2) as (hosts, reach):
            command, settings = launcher_command(Path(sys.executable), hosts, reach, folder / "bin")
            command = [*hosts[0].enter, *command[: command.index("--hosts")]]
            command += ["--host-discovery-script", discovers, "--max-restarts", 1]
            command += [SCRIPTS / script, *words, loses]
            settings |= {"KERAS_DIST_STALL_ABORT_SECONDS": "10", TOLD: "1"}
            environment = lean(FAULT_FOLDER=str(folder), KERAS_BACKEND="torch", **settings)
            act = functools.partial(lose, answer, hosts[1]) if loses else int
            ready, allowed = folder / "ready", within if loses else 180
            code, printed = end_after(act, ready, command, environment, hosts, allowed)
            assert code == 0
            assert ("Restart 1 of 1" in printed) == loses
            assert not hosts[0].run("find", "/dev/shm", "-name", "*.safetensors")
        with np.load(folder / "weights.npz") as found:
            return [found[name] for name in found.files]

    return run


def lose(answer, host):
    """Loses a host with its files. The first host takes its rank."""
    answer.write_text("host1:2\n")
    assert host.run("find", "/dev/shm", "-name", "*.safetensors")
    with contextlib.suppress(ProcessLookupError):
        host.lose()
    host.run("sh", "-c", "rm -rf /dev/shm/*")


def assert_equal_bits(first, second):
    assert len(first) == len(second)
    assert [each.tobytes() for each in first] == [each.tobytes() for each in second]


@pytest.mark.fault(
    "the host of the root is lost with its disk and its memory, under `keras-dist run "
    "--max-restarts`, with a backup in memory",
    "the job restarts on the host that is left from the copy in its memory; it ends with the bits "
    "of an uninterrupted job",
    within=30,
)
def test_the_state_of_a_lost_host_is_in_the_memory_of_another(weights_of):
    state = np.zeros(50_000)
    for step in range(10):
        same = np.sin(state * 3)
        state = (same + (same + np.arange(state.size))) / 2
        state[0] = step + 1
    assert_equal_bits(weights_of(True, "on_hosts.py", "state_in_memory"), [state])


@pytest.mark.slow
def test_a_fit_whose_host_is_lost_ends_with_the_weights_of_an_uninterrupted_one(weights_of):
    lost, whole = (weights_of(loses, "restored.py", "on_hosts") for loses in (True, False))
    assert_equal_bits(lost, whole)
