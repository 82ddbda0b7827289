"""The discovery script names another slot while the job runs: a process joins there."""

import functools
import sys
from pathlib import Path

import pytest
from endings import SCRIPTS, discovery_script, end_after
from namespaces import TOLD, hosts_or_skip
from start_jobs import RUN, launcher, lean
from test_lost_hosts import launcher_command


@pytest.fixture
def run(tmp_path):
    """A function that runs the job, with another answer of the script once it trains."""
    if len(launcher()) > 1:
        pytest.skip("processes join with MPICH only")
    script, answer = discovery_script(tmp_path, "")

    def call(command, first, then, hosts=(), **variables):
        answer.write_text(first)
        words = ["--host-discovery-script", script, "--max-np", "3"]
        words += ["--join-directory", tmp_path / "job", SCRIPTS / "growing_fit.py", '{"size": 3}']
        environment = lean(KERAS_BACKEND="jax", FAULT_FOLDER=str(tmp_path), **variables)
        change, trains = functools.partial(answer.write_text, then), tmp_path / "trains"
        code, printed = end_after(change, trains, [*command, *words], environment, hosts)
        assert code == 0
        assert "1 rank has joined" in printed
        return printed

    return call


@pytest.mark.slow
def test_a_process_joins_on_a_further_slot_of_this_host(run):
    printed = run(RUN, "localhost:2\n", "localhost:4\n")
    assert printed.count("started a process on localhost") == 1  # --max-np 3
    assert "ended 3 on" in printed


@pytest.mark.slow
def test_a_process_joins_on_another_host(run, tmp_path):
    with hosts_or_skip(2) as (hosts, reach):
        command, settings = launcher_command(Path(sys.executable), hosts, reach, tmp_path / "bin")
        command = [*hosts[0].enter, *command[: command.index("--hosts")]]
        how = {"hosts": hosts, TOLD: "1", **settings}
        printed = run(command, "host1:2\n", "host1:2\nhost2:1\n", **how)
    assert "ended 3 on host1 host1 host2" in printed
