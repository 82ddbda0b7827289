"""The network interfaces of this host, and how the MPI library is told to use one of them."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from keras_dist.launch.cli.mpiexec import Library

INTERFACES = Path("/sys/class/net")
# Settings that select an interface, of UCX, libfabric and Open MPI.
SELECTIONS = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")


def interfaces() -> dict[str, int]:
    """Returns the interfaces that are up, and their speed in Mbit/s; 0 if unknown."""
    found = {}
    for path in sorted(INTERFACES.glob("*")):
        with contextlib.suppress(OSError):
            if path.name != "lo" and (path / "operstate").read_text().strip() in ("up", "unknown"):
                found[path.name] = _speed(path)
    return found


def selected(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of an environment that select an interface."""
    return {name: environment[name] for name in SELECTIONS if name in environment}


def select_interface(library: Library, name: str) -> str:
    """Returns how the MPI library is told to use an interface only."""
    if library.is_open_mpi:
        return f"keras-dist run --mpi-args '--mca btl_tcp_if_include {name}'"
    return f"UCX_NET_DEVICES={name} FI_TCP_IFACE={name} in the environment of keras-dist run"


def _speed(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):  # virtual interfaces have none
        return max(0, int((path / "speed").read_text()))
    return 0
