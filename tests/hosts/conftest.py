"""Fixtures of tests that run on several test hosts of this machine."""

import subprocess

import pytest
from namespaces import hosts_or_skip, mpiexec_command
from start_jobs import HANG_SECONDS, lean


@pytest.fixture(scope="session")
def hosts(request):
    """Test hosts, as many as the parameter, and a stand-in for ssh; skips the test without them."""
    with hosts_or_skip(request.param) as made:
        yield made


@pytest.fixture
def run_on_hosts(hosts):
    """A function that runs a Python with arguments on ranks of every host."""

    def run(python, ranks_per_host, *arguments, **variables):
        command, settings = mpiexec_command(python, *hosts, ranks_per_host)
        first = hosts[0][0]
        environment = lean(**settings, **variables)
        environment.pop("PARITY_RECORDS", None)  # these records would be those of a part
        return subprocess.run(
            [*first.enter, *map(str, command), str(python), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
            env=environment,
        )

    return run
