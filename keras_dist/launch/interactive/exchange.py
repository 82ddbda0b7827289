"""The files through which the caller and its ranks communicate, in a private directory.

```
call         caller    function and arguments; variables, import path, sources of cells
log-1        rank 1    output
report-1     rank 1    progress as JSON, rewritten repeatedly
value-1      rank 1    return value of the function
failure-1    rank 1    exception that ended the rank
```

Only the caller and its own ranks write what is unpickled; there is no port.
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


@dataclasses.dataclass(frozen=True)
class Value:
    """The return value of a rank."""

    kind: str
    pickled: bytes


@dataclasses.dataclass(frozen=True)
class Failure:
    """The exception that ended a rank."""

    text: str
    traceback: str
    pickled: bytes
    is_consequence: bool


class JobFiles:
    """The files of one call."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def log(self, rank: int) -> pathlib.Path:
        """Returns the output file of a rank."""
        return self.folder / f"log-{rank}"

    def put_call(self, call: Any) -> None:
        """Writes the call. Raises whatever cloudpickle raises."""
        self._put("call", cloudpickle.dumps(call))

    def call(self) -> Any:
        """Reads the call."""
        return pickle.loads((self.folder / "call").read_bytes())

    def put_outcome(self, rank: int, outcome: Value | Failure) -> None:
        """Writes the outcome of a rank."""
        name = "value" if isinstance(outcome, Value) else "failure"
        self._put(f"{name}-{rank}", pickle.dumps(outcome))

    def outcome(self, rank: int) -> Value | Failure | None:
        """Returns the failure or the value of a rank; `None` while it has none."""
        for name in ("failure", "value"):
            with contextlib.suppress(FileNotFoundError):
                return pickle.loads((self.folder / f"{name}-{rank}").read_bytes())
        return None

    def failures(self, ranks: int) -> dict[int, Failure]:
        """Returns the failures by rank, the original one first."""
        found = {rank: self.outcome(rank) for rank in range(ranks)}
        failed = {rank: outcome for rank, outcome in found.items() if isinstance(outcome, Failure)}

        def sort_key(rank: int) -> tuple[bool, int]:
            written = (self.folder / f"failure-{rank}").stat().st_mtime_ns
            return failed[rank].is_consequence, written

        return {rank: failed[rank] for rank in sorted(failed, key=sort_key)}

    def put_report(self, rank: int, report: str) -> None:
        """Writes the progress of a rank as JSON."""
        self._put(f"report-{rank}", report.encode())

    def report(self, rank: int) -> dict[str, Any]:
        """Returns the latest progress of a rank."""
        try:
            report = json.loads((self.folder / f"report-{rank}").read_bytes())
        except FileNotFoundError:
            report = {"state": "starting"}
        if (self.folder / f"failure-{rank}").exists():
            report["state"] = "failed"
        elif (self.folder / f"value-{rank}").exists():
            report["state"] = "returned"
        return report

    def _put(self, name: str, content: bytes) -> None:
        """Writes a file atomically, without waiting for the disk."""
        path = self.folder / f".{name}-{threading.get_native_id()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(path, self.folder / name)
