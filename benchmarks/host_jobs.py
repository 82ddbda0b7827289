"""Jobs of benchmarks on test hosts: network namespaces of this machine, see scripts/hosts."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from long_links import LongLinks
from namespaces import INTERFACE, Unavailable, make_hosts, mpiexec_command

__all__ = ["Unavailable", "start_on_hosts"]


def start_on_hosts(script, count, ranks, task, gbit=0, environment=None, delay=0):
    """Runs a script's worker on test hosts, and returns what its rank 0 found.

    Args:
        script: path of the script; it is started with `--worker` and a file's path.
        count: how many hosts.
        ranks: how many on each.
        task: what the worker should do, as JSON can hold it; it also gets the address of the
            "first" host.
        gbit: Gbit/s that each host sends at most. Defaults to 0: as many as it can.
        environment: further variables of the job.
        delay: seconds that a packet takes from host to host. Needs `gbit`. Defaults to 0.

    Raises:
        Unavailable: hosts cannot be made on this machine.
    """
    links = LongLinks(gbit, delay) if delay else None
    with contextlib.ExitStack() as stack:
        hosts, reach = stack.enter_context(make_hosts(count, links and links.connect))
        if links is not None:
            stack.enter_context(links.carried())
        for host in hosts if gbit and not delay else ():
            host.limit(gbit)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder) / "task.json"
        path.write_text(json.dumps({**task, "first": hosts[0].address}))
        command, settings = mpiexec_command(Path(sys.executable), hosts, reach, ranks)
        worker = [*command, sys.executable, Path(script).resolve(), "--worker", path]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "TF_CPP_MIN_LOG_LEVEL": "2"}
        subprocess.run(
            [*hosts[0].enter, *map(str, worker)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **settings, **own, **(environment or {})},
            check=True,
        )
        return json.loads(path.with_suffix(".out").read_text())
