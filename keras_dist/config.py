"""Every environment variable of keras_dist: name, type, unit, default, meaning.

Knows the variables and how to parse them; does not know what their values are used for.
`settings()` reads the environment once. A variable that starts with `KERAS_DIST_` and is
not in the table is most likely a typing error, so it is warned about.
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


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable.

    Args:
        field: name of the field in `Settings`; the variable is `KERAS_DIST_` + upper case.
        parse: turns the text into the value; raises `ValueError` when it cannot.
        default: the value, as text, when the variable is not set.
        meaning: what it does, with its unit.
        expected: the values it takes, in words.
        other_name: what Horovod calls it; counts where `name` is not set.
    """

    field: str
    parse: Callable[[str], Any]
    default: str
    meaning: str
    expected: str
    other_name: str = ""

    @property
    def name(self) -> str:
        """The variable's name in the environment."""
        return PREFIX + self.field.upper()


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return words[text.strip().lower()]


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _path(text: str) -> str:
    # Horovod's word for a timeline that a script begins, which here needs no permission.
    return "" if text == "DYNAMIC" else text


def _window(text: str) -> tuple[int, int | None]:
    first, _, end = text.partition(":")
    window = (int(first or 0), int(end) if end else None)
    if ":" not in text or window[0] < 0 or (window[1] is not None and window[1] <= window[0]):
        raise ValueError(text)
    return window


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _endpoint(text: str) -> tuple[str, int] | None:
    """Reads a port, on the loopback interface, or an address and a port."""
    host, _, port = text.strip().rpartition(":")
    number = _port(port)
    return (host.strip("[]") or "127.0.0.1", number) if number else None


def _port(text: str) -> int:
    number = _natural(text)
    if number > 65535:
        raise ValueError(text)
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    return lambda text: words[words.index(text.strip().lower())]


VARIABLES = (
    Variable(
        "bucket_nbytes",
        _natural,
        "0",
        "bytes of gradients that travel together; the last tensor may go over it. 0: 25 MiB, or "
        "what a measurement on these ranks finds for gradients of more than that",
        "a whole number of bytes, 1 or more, or 0",
    ),
    Variable(
        "threads",
        _natural,
        "0",
        "threads of the framework's compute pool in each rank; 0: the cores this rank may use",
        "a whole number, 0 or more",
    ),
    Variable(
        "pin_device",
        _flag,
        "1",
        "whether a rank sees only the GPU of its local rank",
        "0 or 1",
    ),
    Variable(
        "reduce",
        _one_of("copy", "read", "mpi"),
        "copy",
        "how ranks of one node reduce: each copies into shared memory what others reduce "
        "(copy), each reads large gradients from the others' memory where the kernel allows it "
        "(read), or all goes through MPI (mpi)",
        "copy, read or mpi",
    ),
    Variable(
        "overlap",
        _one_of("auto", "on", "off"),
        "auto",
        "whether torch's gradients are reduced while others are computed; auto: over several "
        "nodes, and where every rank has more than one core",
        "auto, on or off",
    ),
    Variable(
        "compression",
        _one_of("none", "fp16", "bf16"),
        "none",
        "what float32 and float64 look like on their way between nodes, in gradients and "
        "allreduce, unless the call says",
        "none, fp16 or bf16",
    ),
    Variable(
        "stall_seconds",
        _natural,
        "60",
        "seconds that a rank waits for others before the root says who has not come and where "
        "those are, and then between one such message and the next; 0: never",
        "a whole number of seconds, 1 or more, or 0",
    ),
    Variable(
        "stall_abort_seconds",
        _natural,
        "600",
        "seconds that a rank waits for others before the job ends, with the stacks of all ranks; "
        "0: never",
        "a whole number of seconds, 1 or more, or 0",
    ),
    Variable(
        "on_failure",
        _one_of("stop", "continue"),
        "stop",
        "what the others do when a rank dies: end (stop), or go on without it, where MPI allows it "
        "(continue)",
        "stop or continue",
    ),
    Variable(
        "restart",
        _natural,
        "0",
        "how often `keras-dist run` has started this job anew; it sets it for the ranks",
        "a whole number, 0 or more",
    ),
    Variable(
        "timeline",
        _path,
        "",
        "the file for a timeline of all ranks, a trace that Chrome and Perfetto open; empty: none",
        "a path",
        "HOROVOD_TIMELINE",
    ),
    Variable(
        "timeline_steps",
        _window,
        "0:",
        "the steps that the timeline shows: the first, counted from 0, and the one before which it "
        "ends",
        "two numbers of steps, such as 100:200, 100: or :200",
    ),
    Variable(
        "timeline_mbytes",
        _positive,
        "100",
        "the size of the whole timeline in MB, about, at which recording ends",
        "a whole number of MB, 1 or more",
    ),
    Variable(
        "top",
        _flag,
        "1",
        "whether the job can be watched: the root listens on a Unix socket of this user's, and "
        "asks the ranks when `keras-dist top` reads from it",
        "0 or 1",
    ),
    Variable(
        "top_port",
        _port,
        "0",
        "a port on the loopback interface of the root's node, for `keras-dist top --address` at "
        "the end of a tunnel; whoever connects needs the token that lies beside the socket. "
        "0: none",
        "a port, 1 to 65535, or 0",
    ),
    Variable(
        "prometheus_port",
        _endpoint,
        "0",
        "where the root answers Prometheus: a port on its loopback interface, or an address and a "
        "port, such as 0.0.0.0:9400; requests need a token. 0: nowhere",
        "a port, or an address and a port, or 0",
    ),
    Variable(
        "prometheus_token_file",
        str.strip,
        "",
        "the file with that token, which its user alone can read; made where it is not there. "
        "Empty: prometheus-token, beside the socket",
        "a path",
    ),
    Variable(
        "single_process",
        _flag,
        "0",
        "1: run as one process and leave MPI alone, whatever a launcher says",
        "0 or 1",
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The parsed values, one field for each entry of `VARIABLES`."""

    bucket_nbytes: int
    threads: int
    pin_device: bool
    reduce: str
    overlap: str
    compression: str
    stall_seconds: int
    stall_abort_seconds: int
    on_failure: str
    restart: int
    timeline: str
    timeline_steps: tuple[int, int | None]
    timeline_mbytes: int
    top: bool
    top_port: int
    prometheus_port: tuple[str, int] | None
    prometheus_token_file: str
    single_process: bool


def parse(environment: Mapping[str, str]) -> Settings:
    """Parses the `KERAS_DIST_*` variables of an environment.

    Args:
        environment: names and texts, such as `os.environ`.

    Returns:
        The settings, defaults filled in.

    Raises:
        ArgumentError: a variable's text cannot be parsed.
    """
    known = {variable.name for variable in VARIABLES}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            warnings.warn(
                f"keras_dist does not know the environment variable {name}. "
                f"It knows: {', '.join(sorted(known))}.",
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
                errors.explain(
                    "[environment]",
                    f"{variable.name} to be {variable.expected}",
                    repr(text),
                    f"Unset it or correct it; the default is {variable.default}.",
                )
            ) from None
    return Settings(**values)


@functools.cache
def settings() -> Settings:
    """Returns the settings of this process; the environment is read at the first call."""
    return parse(os.environ)
