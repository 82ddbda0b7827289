"""The options of `keras-dist run`: one table for the parser and the documentation."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["OPTIONS", "Option", "add_host_options", "add_options"]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option.

    Args:
        names: names; messages use the first with two dashes, or the first.
        meaning: effect, unit and default.
        metavar: placeholder of the value; empty for a flag.
        parse: converts the text to the value.
        choices: accepted values.
        repeated: whether it may occur several times.
        default: default value.
        variable: environment variable that it sets for the ranks.
        horovod: names in `horovodrun`, which are accepted.
    """

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
        words = self.names.split()
        long = next((word for word in words if word.startswith("--")), words[0])
        return long.lstrip("-").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        """Adds the option to a parser, under all names."""
        names = [*dict.fromkeys(f"{self.names} {self.horovod}".split())]
        how: dict[str, Any] = {"dest": self.field, "default": self.default, "help": self.meaning}
        if not self.metavar:
            how |= {"action": "store_true", "default": False}
        elif self.repeated:
            how |= {"action": "append", "metavar": self.metavar, "type": self.parse, "default": []}
        else:
            how |= {"metavar": self.metavar, "type": self.parse, "choices": self.choices}
        parser.add_argument(*names, **how)


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
        raise argparse.ArgumentTypeError(f"expected words: {text!r}: {error}") from None


def _setting(text: str) -> str:
    name = text.partition("=")[0]
    if not name.isidentifier() or not name.isascii():
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE: {text!r}")
    return text


PLACES = (
    Option(
        "-np -n",
        "the number of ranks; by default those that the batch system was asked for, or as many as "
        "the hosts may have",
        "N",
        _number(1),
        horovod="-np --num-proc",
    ),
    Option(
        "-H --hosts",
        "hosts, and how many ranks each may have (1): h1:2,h2:2",
        "HOSTS",
        horovod="-H --hosts",
    ),
    Option(
        "--hostfile",
        "a file with a host a line: `h1 slots=2` or `h1:2`",
        "FILE",
        horovod="-hostfile --hostfile",
    ),
    Option(
        "--env -x",
        "a variable that ranks on other hosts get as well, with its value here or another; may be "
        "repeated",
        "NAME[=VALUE]",
        _setting,
        repeated=True,
    ),
    Option(
        "--mpi-args",
        "further words for mpiexec, as one text",
        "WORDS",
        _split,
        horovod="--mpi-args",
    ),
)
OPTIONS = (
    *PLACES,
    Option(
        "--bind",
        "whether each rank runs on its own share of a node's cores: `cores`, `none`, `mpiexec` as "
        "that thinks right; `auto`, the default: `cores` where a batch system has given the node, "
        "else `none`, as two jobs would take the same cores",
        "WAY",
        choices=("auto", "cores", "none", "mpiexec"),
        default="auto",
    ),
    Option(
        "--log-dir",
        "a folder for one file a rank, `rank-0.log` and so on, on the rank's own host, with "
        "all that it prints",
        "DIR",
        horovod="--output-filename",
    ),
    Option(
        "--max-restarts",
        "how often a job that fails is started anew (0)",
        "N",
        _number(0),
        default=0,
        horovod="--reset-limit",
    ),
    Option(
        "--on-failure",
        "when a rank dies: `stop`; `restart`, what --max-restarts means; or `continue`: the others "
        "go on without it, with Open MPI 5 or newer, which sets KERAS_DIST_ON_FAILURE",
        "WAY",
        choices=("stop", "restart", "continue"),
    ),
    Option(
        "--host-discovery-script",
        "a program, with its arguments, that is asked at each start of the job, restarts included, "
        "which hosts there are: a host a line, `h1:2`; no shell reads it",
        "COMMAND",
        _split,
        horovod="--host-discovery-script",
    ),
    Option(
        "--min-np",
        "with such a script: how many ranks there have to be (-np, or 1); until then it is asked "
        "again",
        "N",
        _number(1),
        horovod="--min-np --min-num-proc",
    ),
    Option(
        "--max-np",
        "with such a script: how many ranks there are at most (-np, or as many as there is room "
        "for)",
        "N",
        _number(1),
        horovod="--max-np --max-num-proc",
    ),
    Option(
        "--elastic-timeout",
        "with such a script: for how many seconds too few places are waited for (600)",
        "SECONDS",
        _number(0),
        default=600,
        horovod="--elastic-timeout",
    ),
    Option(
        "--timeout",
        "ends the job, all tries and the waiting for hosts together, after so many seconds; exit "
        "code 124",
        "SECONDS",
        _number(1),
    ),
    Option(
        "--stall-seconds",
        "seconds that a rank waits for others before the root says so",
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
        "where what each rank does when is written",
        "FILE",
        variable="KERAS_DIST_TIMELINE",
        horovod="--timeline-filename",
    ),
    Option(
        "--bucket-mb",
        "MiB of gradients that travel together; 0: each by itself",
        "MIB",
        lambda text: str(max(1, _number(0)(text) * 2**20)),
        variable="KERAS_DIST_BUCKET_NBYTES",
        horovod="--fusion-threshold-mb",
    ),
    Option("--config-file", "a file with options; the command line wins", "FILE",
           horovod="--config-file"),
    Option("--verbose", "print the command before it is started", horovod="--verbose"),
    Option("--dry-run", "print the command, start nothing"),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options to a parser."""
    for option in OPTIONS:
        option.add_to(parser)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for hosts, slots and the connection to hosts."""
    for option in PLACES:
        option.add_to(parser)
