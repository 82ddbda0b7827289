"""The comparison of hosts: the same versions on all ranks, and clocks that agree."""

import logging
import os
import sys
import time
from typing import Any

import numpy as np

from keras_dist import _backends, _engine, errors
from keras_dist._version import __version__

CLOCK_SECONDS = 60  # by which clocks may differ without a warning

_log = logging.getLogger("keras_dist")


def compare_hosts(mpi: Any, comm: Any) -> None:
    """Compares versions and clocks of the ranks. Collective: every rank; blocks.

    Uses MPI alone: the messages of another version of keras_dist may have another form.
    """
    found = versions(mpi)
    comm.Barrier()  # so that all ranks read their clocks at the same time
    ranks = comm.allgather((os.uname().nodename, found, time.time()))
    for rank, (host, received, _) in enumerate(ranks):
        _check_versions(f"[rank {rank} of {len(ranks)}]", ranks[0], host, received)
    if comm.rank == 0:
        _warn_of_clocks([(host, clock) for host, _, clock in ranks])


def _check_versions(
    where: str, first: tuple[str, dict[str, str], float], host: str, received: dict[str, str]
) -> None:
    first_host, expected, _ = first
    names = [
        name
        for name in dict.fromkeys([*expected, *received])
        if expected.get(name) != received.get(name)
    ]
    if names:
        raise errors.MismatchError(
            where,
            f"{_listed(expected, names)} as on rank 0 (on {first_host})",
            f"{_listed(received, names)} (on {host})",
            "Install the same versions on every host, or share one environment between the hosts.",
        )


def _listed(versions: dict[str, str], names: list[str]) -> str:
    return ", ".join(f"{name} {versions.get(name, 'not imported')}" for name in names)


def _warn_of_clocks(clocks: list[tuple[str, float]]) -> None:
    """Warns once of the host whose clock differs most from that of rank 0."""
    first_host, first = clocks[0]
    host, clock = max(clocks, key=lambda pair: abs(pair[1] - first))
    if abs(clock - first) > CLOCK_SECONDS:
        text = errors.explain(
            "[keras_dist.init]",
            f"clocks of all hosts within {CLOCK_SECONDS} s of that of {first_host}",
            f"{clock - first:+.0f} s on {host}",
            "Times in logs and files of the hosts do not compare. Synchronise the clocks, for "
            "example with chronyd; `chronyc tracking` shows the offset.",
        )
        _log.warning("%s", text)


def versions(mpi: Any) -> dict[str, str]:
    """Returns the versions that must match, by name. Patch releases of Python may differ."""
    backends: list[Any] = _backends.in_use()
    frameworks = [backend.__name__.rpartition(".")[2] for backend in backends]
    loaded = [(name, sys.modules.get(name)) for name in ("keras", *frameworks)]
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "keras_dist": __version__,
        "MPI": _engine.library.version(mpi),
        "numpy": np.__version__,
        **{name: module.__version__ for name, module in loaded if module is not None},
    }
