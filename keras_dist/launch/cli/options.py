"""The options of `keras-dist run`, on the command line and in a file, and those of `horovodrun`."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_dist import config, errors


@dataclasses.dataclass(frozen=True)
class Option:
    """An option."""

    names: str
    meaning: str
    metavar: str = ""
    parse: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    repeated: bool = False
    default: Any = None
    variable: str = ""
    horovod: str = ""

    @property
    def field(self) -> str:
        """The attribute in the parsed options."""
        return max(self.names.split(), key=len).lstrip("-").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        """Adds the option to a parser, under all names."""
        names = dict.fromkeys(f"{self.names} {self.horovod}".split())
        settings: dict[str, Any] = {"action": "store_true"}
        if self.metavar:
            settings = {"metavar": self.metavar, "type": self.parse, "choices": self.choices}
            settings["action"] = "append" if self.repeated else "store"
        parser.add_argument(
            *names, dest=self.field, default=self.default, help=self.meaning, **settings
        )


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more: {text!r}")
        return int(text)

    return number


def _split(text: str) -> list[str]:
    """Splits text as a shell would, without running one."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected arguments: {text!r}: {error}") from None


def _setting(text: str) -> str:
    name = text.partition("=")[0]
    if not name.isidentifier() or not name.isascii():
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE: {text!r}")
    return text


def _left(text: str) -> str:
    raise argparse.ArgumentTypeError(f"ranks do not join a job that runs. {config.START_AGAIN}")


HOST_OPTIONS = (
    Option(
        "-np -n",
        "number of ranks. Defaults to the number that the batch system allocated, or to all slots "
        "of the hosts",
        "N",
        _number(1),
        horovod="-np --num-proc",
    ),
    Option(
        "-H --hosts",
        "hosts with their slots (1): h1:2,h2:2",
        "HOSTS",
        horovod="-H --hosts",
    ),
    Option(
        "--hostfile",
        "file with one host per line: `h1 slots=2` or `h1:2`",
        "FILE",
        horovod="-hostfile --hostfile",
    ),
    Option(
        "--env -x",
        "environment variable to pass to ranks on other hosts, with its current value or the given "
        "one; may be repeated",
        "NAME[=VALUE]",
        _setting,
        repeated=True,
        default=[],
    ),
    Option(
        "--mpi-args",
        "further arguments of mpiexec, as one string",
        "ARGUMENTS",
        _split,
        horovod="--mpi-args",
    ),
)
OPTIONS = (
    *HOST_OPTIONS,
    Option(
        "--bind",
        "binding of ranks: `cores` binds each rank to its share of the cores of a node, `none` "
        "does not bind, `mpiexec` uses the default of mpiexec, and `auto` is `cores` in an "
        "allocation of a batch system, else `none`, because two jobs would use the same cores "
        "(auto)",
        "BINDING",
        choices=("auto", "cores", "none", "mpiexec"),
        default="auto",
    ),
    Option(
        "--log-dir",
        "directory for the output of each rank, `rank-0.log` and so on, on the host of the rank",
        "DIR",
        horovod="--output-filename",
    ),
    Option(
        "--max-restarts",
        "maximum number of restarts of a failed job (0)",
        "N",
        _number(0),
        default=0,
        horovod="--reset-limit",
    ),
    Option(
        "--standby",
        "with --max-restarts, whether a process for each rank waits with everything imported, so "
        "that a restart takes little time: 0 or 1 (1)",
        "0/1",
        choices=("0", "1"),
        variable="KERAS_DIST_STANDBY",
    ),
    Option(
        "--on-failure",
        "reaction to the death of a rank: `stop` ends the job, `restart` restarts it (see "
        "--max-restarts), and `continue` sets KERAS_DIST_ON_FAILURE, so that the remaining ranks "
        "continue (Open MPI 5 or newer)",
        "REACTION",
        lambda text: _left(text) if text == "replace" else text,
        choices=("stop", "restart", "continue"),
    ),
    Option(
        "--host-discovery-script",
        "program with arguments that prints the available hosts, one per line: `h1:2`. It runs "
        "before each start and restart of the job, without a shell; with --min-np or --max-np also "
        "while the job runs, which is then asked to save its state, and starts again on other "
        "hosts",
        "COMMAND",
        _split,
        horovod="--host-discovery-script",
    ),
    Option(
        "--min-np",
        "minimum number of ranks. Hosts of a discovery script or a hostfile are read again until "
        "there are enough slots "
        "(-np, or 1). With --on-failure continue the job ends in `fit` when fewer are left",
        "N",
        _number(1),
        horovod="--min-np --min-num-proc",
    ),
    Option(
        "--max-np",
        "maximum number of ranks at each start, with a host discovery script or a hostfile (-np, "
        "or all slots)",
        "N",
        _number(1),
        horovod="--max-np --max-num-proc",
    ),
    Option(
        "--elastic-timeout",
        "with a host discovery script: maximum seconds to wait for enough slots (600)",
        "SECONDS",
        _number(0),
        default=600,
        horovod="--elastic-timeout",
    ),
    Option(
        "--timeout",
        "time limit of the job in seconds, including restarts and waits for hosts; then the exit "
        "code is 124",
        "SECONDS",
        _number(1),
    ),
    Option(
        "--stall-seconds",
        "seconds that a rank waits for others before rank 0 logs a warning",
        "SECONDS",
        variable="KERAS_DIST_STALL_SECONDS",
        horovod="--stall-check-warning-time-seconds",
    ),
    Option(
        "--stall-abort-seconds",
        "seconds that a rank waits for others before the job ends",
        "SECONDS",
        variable="KERAS_DIST_STALL_ABORT_SECONDS",
        horovod="--stall-check-shutdown-time-seconds",
    ),
    Option(
        "--timeline",
        "file for the timeline of the job",
        "FILE",
        variable="KERAS_DIST_TIMELINE",
        horovod="--timeline-filename",
    ),
    Option(
        "--bucket-mb",
        "size of gradient buckets in MiB; 0 reduces each gradient by itself",
        "MIB",
        lambda text: str(max(1, _number(0)(text) * 2**20)),
        variable="KERAS_DIST_BUCKET_NBYTES",
        horovod="--fusion-threshold-mb",
    ),
    Option("--config-file", "YAML file with options; the command line overrides them", "FILE",
           horovod="--config-file"),
    Option("--verbose", "print the command before it starts", horovod="--verbose"),
    Option("--dry-run", "print the command without starting it"),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options to a parser."""
    for option in OPTIONS:
        option.add_to(parser)
    parser.add_argument("--join-directory", type=_left, help=argparse.SUPPRESS)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for hosts, slots and the connection to hosts."""
    for option in HOST_OPTIONS:
        option.add_to(parser)


def arguments_of_file(path: str) -> list[str]:
    """Returns the options of a YAML file as command-line arguments."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise _bad_file("a YAML file with options", f"{path}: {text}") from None
    if not isinstance(found, dict):
        raise _bad_file(f"{path} to hold lines like 'max-restarts: 3'", repr(found))
    known = {
        name.lstrip("-"): (name, option)
        for option in OPTIONS
        for name in f"{option.names} {option.horovod}".split()
        if option.field != "config_file"
    }
    words = []
    for key, value in found.items():
        name, option = known.get(str(key).replace("_", "-"), (None, None))
        if name is None or option is None:
            raise _bad_file(f"options in {path} that keras-dist run has", repr(key))
        if isinstance(value, bool) != (not option.metavar):
            expected = "a value" if option.metavar else "true or false"
            raise _bad_file(f"{key} in {path} to have {expected}", repr(value))
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, list) and option.repeated:
            words += [f"{name}={item}" for item in value]
        elif isinstance(value, str | int | float):
            words += [f"{name}={value}"]
        else:
            raise _bad_file(f"{key} in {path} to have one value", repr(value))
    return words


def _bad_file(expected: str, received: str) -> errors.ArgumentError:
    remedy = "The names are the long options without leading dashes; see keras-dist run -h."
    return errors.ArgumentError("[keras-dist run]", expected, received, remedy)


_ELASTIC = "Leave it out: the script of --host-discovery-script prints hosts with slots."
_NETWORK = (
    "Pass it to mpiexec: --mpi-args '-iface eth0' for MPICH, "
    "--mpi-args '--mca btl_tcp_if_include eth0' for Open MPI."
)
_SSH = "Set it in ~/.ssh/config, which the ssh of mpiexec reads."
_NO_CYCLES = "Leave it out: there is no negotiation, no cycle and no cache."
_BY_NODES = "Leave it out: the algorithm is chosen from the ranks of each node."
_TUNED = "Leave it out: the bucket size is that of --bucket-mb."
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
    """Adds options of `horovodrun` that do not apply; each raises an error with its replacement."""
    for name in REFUSED:
        parser.add_argument(name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} of horovodrun does not apply. {REFUSED[option_string]}")
