"""Options of `horovodrun` that do not apply here, and their replacements."""

import argparse
from typing import Any

_ELASTIC = "Leave it out: the script of --host-discovery-script prints hosts with slots."
_NETWORK = (
    "Pass it to mpiexec: --mpi-args '-iface eth0' for MPICH, "
    "--mpi-args '--mca btl_tcp_if_include eth0' for Open MPI."
)
_SSH = "Set it in ~/.ssh/config, which the ssh of mpiexec reads."
_NO_CYCLES = "Leave it out: there is no negotiation, no cycle and no cache."
_BY_NODES = "Leave it out: the algorithm is chosen from the ranks of each node."
_TUNED = "Leave it out: the bucket size is measured once, unless --bucket-mb is set."
_ONE_WAY = "Leave it out: ranks communicate through shared memory and MPI only."
_LOGGER = "Set it in the script: logging.getLogger('keras_dist').setLevel(...)."
REFUSED = {
    name: remedy
    for names, remedy in {
        "--gloo --mpi --jsrun --tcp --gloo-timeout-seconds --num-nccl-streams": _ONE_WAY,
        "--mpi-threads-disable --no-mpi-threads-disable": _ONE_WAY,
        "--network-interface --network-interfaces": _NETWORK,
        "-p --ssh-port -i --ssh-identity-file": _SSH,
        "--slots-per-host --blacklist-cooldown-range": _ELASTIC,
        "--cycle-time-ms --cache-capacity --disable-cache": _NO_CYCLES,
        "--timeline-mark-cycles --no-timeline-mark-cycles": _NO_CYCLES,
        "--hierarchical-allreduce --no-hierarchical-allreduce --torus-allreduce": _BY_NODES,
        "--no-torus-allreduce --hierarchical-allgather --no-hierarchical-allgather": _BY_NODES,
        "--autotune --no-autotune --autotune-log-file --autotune-warmup-samples": _TUNED,
        "--autotune-steps-per-sample --autotune-bayes-opt-max-samples": _TUNED,
        "--autotune-gaussian-process-noise": _TUNED,
        "--log-level --log-with-timestamp --log-without-timestamp": _LOGGER,
        "--log-hide-timestamp --no-log-hide-timestamp": _LOGGER,
        "-prefix-timestamp --prefix-output-with-timestamp": "Pipe the output through ts.",
        "--start-timeout": "Pass --timeout, the seconds after which the whole job ends.",
        "--stall-check": "Leave it out: stalls are checked by default.",
        "--no-stall-check": "Pass --stall-seconds 0 --stall-abort-seconds 0.",
        "--binding-args": "Pass --bind, or --mpi-args with --bind mpiexec.",
        "--thread-affinity": "Pass --bind.",
        "-cb --check-build": "Run keras-dist doctor.",
        "-v --version": "Run keras-dist --version.",
    }.items()
    for name in names.split()
}


def refuse(parser: argparse.ArgumentParser) -> None:
    """Adds these options to a parser; each raises an error with its replacement."""
    for name in REFUSED:
        parser.add_argument(name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} of horovodrun does not apply. {REFUSED[option_string]}")
