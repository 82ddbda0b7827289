"""A host is lost whole: the job goes on from a backup in the memory of another host."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
from endings import SCRIPTS, discovery_script, end_after
from namespaces import TOLD, hosts_or_skip
from start_jobs import lean
from test_lost_hosts import launcher_command


@pytest.mark.fault(
    "the host of the root is lost with its disk and its memory, under `keras-dist run "
    "--max-restarts`, with a backup in memory",
    "the job restarts on the host that is left from the copy in its memory; it ends with the bits "
    "of an uninterrupted job",
    within=30,
)
def test_the_state_of_a_lost_host_is_in_the_memory_of_another(tmp_path):
    discovers, answer = discovery_script(tmp_path, "host1:1\nhost2:1\n")
    with hosts_or_skip(2) as (hosts, reach):
        first, second = hosts
        command, settings = launcher_command(Path(sys.executable), hosts, reach, tmp_path / "bin")
        command = [*first.enter, *command[: command.index("--hosts")]]
        command += ["--host-discovery-script", discovers, "--max-restarts", 1]
        command += [SCRIPTS / "on_hosts.py", "state_in_memory"]
        settings |= {"KERAS_DIST_STALL_ABORT_SECONDS": "10", TOLD: "1"}
        environment = lean(FAULT_FOLDER=str(tmp_path), **settings)

        def lose():
            """Loses a host with its files. The first host takes its rank."""
            answer.write_text("host1:2\n")
            assert second.run("find", "/dev/shm", "-name", "*.safetensors")
            with contextlib.suppress(ProcessLookupError):
                second.lose()
            second.run("sh", "-c", "rm -rf /dev/shm/*")

        ready = tmp_path / "ready"
        code, printed = end_after(lose, ready, command, environment, hosts, within=30)
        assert code == 0
        assert "Restart 1 of 1" in printed
        assert not first.run("find", "/dev/shm", "-name", "*.safetensors")
    state = np.zeros(50_000)
    for step in range(10):
        same = np.sin(state * 3)
        state = (same + (same + np.arange(state.size))) / 2
        state[0] = step + 1
    with np.load(tmp_path / "weights.npz") as found:
        assert found["arr_0"].tobytes() == state.tobytes()
