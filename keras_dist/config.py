"""Environment variables of keras_dist: name, parser, default and meaning.

`VARIABLES` is the source of docs/configuration.md. `settings()` reads the environment once. An
unknown variable that starts with `KERAS_DIST_` is probably a typing error and causes a warning.
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist import errors

__all__ = ["VARIABLES", "Settings", "Variable", "parse", "settings"]

PREFIX = "KERAS_DIST_"
START_AGAIN = (
    "keras-dist run --max-restarts 3 starts a job again, and with --host-discovery-script on the "
    "hosts that there are then; it goes on from BackupAndRestore(..., memory=True)."
)
_LEFT = {
    "KERAS_DIST_JOIN_DIRECTORY": "",
    "KERAS_DIST_JOINS": "",
    "KERAS_DIST_MAX_NP": "",
    "KERAS_DIST_ON_FAILURE": "replace",
}  # variables that have left with their feature: names, and the one value that has


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable: `KERAS_DIST_` and the upper case of a field in `Settings`."""

    field: str
    parse: Callable[[str], Any]  # raises `ValueError` or `KeyError` for other text
    default: str  # as text
    meaning: str  # effect and unit, in Markdown; shown in docs/configuration.md
    expected: str  # in words
    other_name: str = ""  # Horovod's variable, read when `name` is not set

    @property
    def name(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.field.upper()


def _variable(*description: Any) -> Any:
    """Returns a field of `Settings`, from the arguments of `Variable` behind `field`."""
    return dataclasses.field(metadata={"variable": description})


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return words[text.strip().lower()]


def _integer(text: str, least: int = 0) -> int:
    number = int(text)
    if number < least:
        raise ValueError(text)
    return number


_positive = functools.partial(_integer, least=1)


def _path(text: str) -> str:
    # Horovod needs DYNAMIC before a script may start a timeline; keras_dist does not.
    return "" if text == "DYNAMIC" else text


def _step_range(text: str) -> tuple[int, int | None]:
    first, _, end = text.partition(":")
    start, stop = int(first or 0), int(end) if end else None
    if ":" not in text or start < 0 or (stop is not None and stop <= start):
        raise ValueError(text)
    return start, stop


def _endpoint(text: str) -> tuple[str, int] | None:
    """Parses a port on the loopback interface, or an address and a port; `None` for port 0."""
    host, _, port = text.strip().rpartition(":")
    number = _port(port)
    return (host.strip("[]") or "127.0.0.1", number) if number else None


def _port(text: str) -> int:
    number = _integer(text)
    if number > 65535:
        raise ValueError(text)
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    return lambda text: words[words.index(text.strip().lower())]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of the environment variables, each a field with its variable."""

    bucket_nbytes: int = _variable(
        _integer,
        "0",
        "Size of a gradient bucket in bytes; the last tensor of a bucket may exceed it. 0: 4 MiB "
        "if gradients are reduced while others are computed; otherwise 25 MiB.",
        "a whole number of bytes, 1 or more, or 0",
    )
    threads: int = _variable(
        _integer,
        "0",
        "Threads in the compute pool of the framework, for each rank. 0: the cores available to "
        "the rank.",
        "a whole number, 0 or more",
    )
    pin_device: bool = _variable(
        _flag,
        "1",
        "1: each rank uses the GPU of its local rank. 0: the script selects the GPU.",
        "0 or 1",
    )
    gpu: str = _variable(
        _one_of("auto", "nccl", "host"),
        "auto",
        "How arrays of GPUs are reduced. `nccl`: on the GPUs, by NCCL or RCCL. `host`: through "
        "pinned host memory. `auto`: by NCCL if it is installed and every rank has its own GPU.",
        "auto, nccl or host",
    )
    reduce: str = _variable(
        _one_of("copy", "mpi"),
        "copy",
        "Reduction within a node. `copy`: each rank copies its contribution into shared memory. "
        "`mpi`: MPI reduces.",
        "copy or mpi",
    )
    reduction: str = _variable(
        _one_of("ordered", "library"),
        "ordered",
        "Sums and products between nodes of float32, float64 and complex arrays over 64 KiB. "
        "`ordered`: the order of sums depends on the nodes only. `library`: `MPI_Allreduce`, whose "
        "order of sums is its own: bits may differ between runs, and with the size, the number of "
        "ranks and the settings of the library; MPI does not guarantee equal bits on all ranks.",
        "ordered or library",
    )
    overlap: str = _variable(
        _one_of("auto", "on", "off"),
        "auto",
        "Whether gradients are reduced while others are computed. `auto`: on several nodes, or "
        "when every rank has more than one core.",
        "auto, on or off",
    )
    compression: str = _variable(
        _one_of("none", "fp16", "bf16"),
        "none",
        "Default compression of float32 and float64 between nodes, for gradients and `allreduce`.",
        "none, fp16 or bf16",
    )
    stall_seconds: int = _variable(
        _integer,
        "60",
        "Seconds a rank waits before the root reports the missing ranks and their stacks, and "
        "the interval between reports. 0: no report.",
        "a whole number of seconds, 1 or more, or 0",
    )
    stall_abort_seconds: int = _variable(
        _integer,
        "600",
        "Seconds a rank waits before the job ends with the stacks of all ranks. 0: no limit.",
        "a whole number of seconds, 1 or more, or 0",
    )
    on_failure: str = _variable(
        _one_of("stop", "continue"),
        "stop",
        "Reaction to the death of a rank. `stop`: the job ends. `continue`: the other ranks "
        "continue, if MPI supports it.",
        "stop or continue",
    )
    min_np: int = _variable(
        _integer,
        "0",
        "Least number of ranks in `fit` of a job that continues when ranks die. 0: no limit. "
        "`keras-dist run --min-np` sets it.",
        "a whole number, 0 or more",
    )
    restart: int = _variable(
        _integer,
        "0",
        "Number of restarts of this job so far. `keras-dist run` sets it for the ranks.",
        "a whole number, 0 or more",
    )
    starts_again: bool = _variable(
        _flag,
        "0",
        "1: the job is started again after a failure, or on other hosts, so commits of "
        "`keras_dist.elastic` also lie in memory. `keras-dist run` sets it.",
        "0 or 1",
    )
    job_id: str = _variable(
        str.strip,
        "",
        "Identifies the job: a restarted job has the same text, by which it finds its backups in "
        "memory. `keras-dist run` sets it, unless it is set. Empty: no backups in memory.",
        "a text that no other job has",
    )
    standby: bool = _variable(
        _flag,
        "1",
        "1: `keras-dist run --max-restarts` keeps a process for each rank that has imported what "
        "the ranks have, so that a restart imports nothing. 0: no such processes.",
        "0 or 1",
    )
    standby_server: str = _variable(
        str,
        "",
        "Token and addresses by which these processes are told to start. `keras-dist run` sets it.",
        "a text of keras-dist run",
    )
    memory_directory: str = _variable(
        str,
        "/dev/shm",
        "Directory of each node for backups in memory, in a memory file system.",
        "a path",
    )
    timeline: str = _variable(
        _path,
        "",
        "File for a timeline of all ranks, a trace for Chrome and Perfetto. Empty: no timeline.",
        "a path",
        "HOROVOD_TIMELINE",
    )
    timeline_steps: tuple[int, int | None] = _variable(
        _step_range,
        "0:",
        "Steps in the timeline: the first step, counted from 0, and the step after the last.",
        "two numbers of steps, such as 100:200, 100: or :200",
    )
    timeline_mbytes: int = _variable(
        _positive,
        "100",
        "Approximate size of the timeline in MB at which recording ends.",
        "a whole number of MB, 1 or more",
    )
    top: bool = _variable(
        _flag,
        "1",
        "1: `keras-dist top` can monitor the job through a Unix socket that only its user can "
        "open. 0: no monitoring.",
        "0 or 1",
    )
    top_port: int = _variable(
        _port,
        "0",
        "Port on the loopback interface of the root's node for `keras-dist top --address`. "
        "Requests need the token in the directory of the socket. 0: no port.",
        "a port, 1 to 65535, or 0",
    )
    prometheus_port: tuple[str, int] | None = _variable(
        _endpoint,
        "0",
        "Port on the loopback interface, or `address:port`, where the root answers Prometheus. "
        "Requests need a token. 0: no port.",
        "a port, or an address and a port, or 0",
    )
    prometheus_token_file: str = _variable(
        str.strip,
        "",
        "File with the Prometheus token, created if missing and readable by its user only. Empty: "
        "`prometheus-token` in the directory of the socket.",
        "a path",
    )
    single_process: bool = _variable(
        _flag,
        "0",
        "1: run as a single process without MPI, whatever the launcher sets.",
        "0 or 1",
    )


VARIABLES = tuple(
    Variable(each.name, *each.metadata["variable"]) for each in dataclasses.fields(Settings)
)


def parse(environment: Mapping[str, str]) -> Settings:
    """Returns the settings of an environment; raises `ArgumentError` if a text is invalid."""
    known = {variable.name for variable in VARIABLES}
    for name, value in _LEFT.items():
        if (text := environment.get(name)) and value in ("", text):
            expected = f"{name} to be unset: ranks do not join a job that runs"
            raise errors.ArgumentError("[environment]", expected, repr(text), START_AGAIN)
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            warnings.warn(
                f"keras_dist does not know the environment variable {name}. "
                f"Known variables: {', '.join(sorted(known))}.",
                stacklevel=2,
            )
    values = {}
    for variable in VARIABLES:
        other = environment.get(variable.other_name, variable.default)
        text = environment.get(variable.name, other)
        try:
            values[variable.field] = variable.parse(text)
        except (ValueError, KeyError):
            raise errors.ArgumentError(
                "[environment]",
                f"{variable.name} to be {variable.expected}",
                repr(text),
                f"Correct or unset the variable; the default is {variable.default}.",
            ) from None
    return Settings(**values)


@functools.cache
def settings() -> Settings:
    """Returns the settings of this process; the environment is read at the first call."""
    return parse(os.environ)
