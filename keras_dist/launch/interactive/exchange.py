"""What the caller and its ranks tell each other: files in a directory that the user alone can read.

```
call         caller    function and arguments; variables, path of imports, sources of cells
log-1        rank 1    what it prints
report-1     rank 1    where it is, as JSON, again and again
value-1      rank 1    what the function has returned
failure-1    rank 1    the exception that has ended it
```

What is unpickled was written by the caller or by a rank of its own; there is no port.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import threading
from typing import Any

import cloudpickle

__all__ = ["Exchange", "Failure", "Value"]


@dataclasses.dataclass(frozen=True)
class Value:
    """What a rank has returned.

    Args:
        kind: the name of its type.
        pickled: the value.
    """

    kind: str
    pickled: bytes


@dataclasses.dataclass(frozen=True)
class Failure:
    """What has ended a rank.

    Args:
        text: the exception in a line.
        traceback: where it came from.
        pickled: the exception; empty where it cannot be pickled.
        is_consequence: whether it tells of the end of another rank.
    """

    text: str
    traceback: str
    pickled: bytes
    is_consequence: bool


class Exchange:
    """The files of one call.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def log(self, rank: int) -> pathlib.Path:
        """Returns the file of what a rank prints."""
        return self.folder / f"log-{rank}"

    def put_call(self, call: Any) -> None:
        """Keeps what the ranks are to call; whatever cloudpickle raises is raised."""
        self._put("call", cloudpickle.dumps(call))

    def call(self) -> Any:
        """Returns what the ranks are to call."""
        return pickle.loads((self.folder / "call").read_bytes())

    def put_outcome(self, rank: int, outcome: Value | Failure) -> None:
        """Keeps how a rank has ended."""
        name = "value" if isinstance(outcome, Value) else "failure"
        self._put(f"{name}-{rank}", pickle.dumps(outcome))

    def outcome(self, rank: int) -> Value | Failure | None:
        """Returns how a rank has ended: its failure, or else its value, if there is one yet."""
        for name in ("failure", "value"):
            with contextlib.suppress(FileNotFoundError):
                return pickle.loads((self.folder / f"{name}-{rank}").read_bytes())
        return None

    def failures(self, ranks: int) -> dict[int, Failure]:
        """Returns the failures by rank, that which the others come from first."""
        found = {rank: self.outcome(rank) for rank in range(ranks)}
        failed = {rank: one for rank, one in found.items() if isinstance(one, Failure)}

        def place(rank: int) -> tuple[bool, int]:
            written = (self.folder / f"failure-{rank}").stat().st_mtime_ns
            return failed[rank].is_consequence, written

        return {rank: failed[rank] for rank in sorted(failed, key=place)}

    def put_report(self, rank: int, report: str) -> None:
        """Keeps where a rank is, as JSON."""
        self._put(f"report-{rank}", report.encode())

    def report(self, rank: int) -> dict[str, Any]:
        """Returns where a rank is, as far as it has said."""
        try:
            said = json.loads((self.folder / f"report-{rank}").read_bytes())
        except FileNotFoundError:
            said = {"state": "starting"}
        if (self.folder / f"failure-{rank}").exists():
            said["state"] = "failed"
        elif (self.folder / f"value-{rank}").exists():
            said["state"] = "returned"
        return said

    def _put(self, name: str, content: bytes) -> None:
        """Writes a file that readers find whole. What is only of use today need not be on disk."""
        path = self.folder / f".{name}-{threading.get_native_id()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(path, self.folder / name)
