"""What the programs of the fault tests share: the record of a fault, and ways to cause one.

`script.py FUNCTION [ARGUMENT ...]` calls a function of a script that ends with `run(globals())`.
"""

import os
import pathlib
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(os.environ["FAULT_FOLDER"])
# The rank before `init`, from the launcher.
LAUNCHED_AS = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))

(FOLDER / f"pid-{os.getpid()}").touch()


def run(functions: dict[str, Any]) -> None:
    """Calls the function that the command line names, with its further arguments."""
    functions[sys.argv[1]](*sys.argv[2:])


def fault() -> None:
    """Records the time of the fault, and the shared memory of this process."""
    (FOLDER / "fault").write_text(str(time.time()))
    maps = pathlib.Path("/proc/self/maps").read_text()
    names = [line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line]
    with (FOLDER / "shared").open("a") as shared:
        shared.writelines(f"{name}\n" for name in names)


def send(name: str) -> None:
    """Sends a signal to this process."""
    os.kill(os.getpid(), getattr(signal, name))


def die() -> None:
    """Kills this process, which is the fault."""
    fault()
    send("SIGKILL")


def break_down() -> None:
    """Raises an error, which is the fault."""
    fault()
    raise ValueError("broken on purpose")


def tell(*what: object) -> None:
    """Prints a line at once, and whole: other ranks print now."""
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def expect(error: type[Exception], call: Callable[..., object], *arguments: Any) -> str:
    """Returns the text of the error that a call must raise."""
    try:
        call(*arguments)
    except error as raised:
        return str(raised)
    raise SystemExit(f"no {error.__name__}")


def flip(path: pathlib.Path) -> None:
    """Damages a file: changes a bit in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def limit_files(nbytes: int = resource.RLIM_INFINITY) -> None:
    """Limits the size of files: writes fail as on a full disk, without any privileges."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def die_at_call(number: int) -> None:
    """Has this process die before a call of the file system."""
    calls = iter(range(number))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                send("SIGKILL")
            return call(*arguments, **options)

        return call_or_die

    for name in ("write", "fsync", "replace"):
        setattr(os, name, counted(getattr(os, name)))
