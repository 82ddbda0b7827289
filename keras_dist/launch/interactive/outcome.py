"""What goes to the ranks of a call and comes back: functions as bytes, values, and exceptions."""

import collections
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import pickle
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.monitor.report import Report
from keras_dist.storage import atomic_write

SHOWN_LINES = 20


@dataclasses.dataclass(frozen=True)
class Value:
    """The return value of a rank."""

    kind: str
    pickled: bytes


@dataclasses.dataclass(frozen=True)
class Failure:
    """The exception that ended a rank; of several, the first one that is no consequence counts."""

    text: str
    traceback: str
    pickled: bytes
    is_consequence: bool
    moment: float = dataclasses.field(default_factory=time.time)

    def error(self) -> BaseException | None:
        """Returns the exception; `None` for one that cannot be rebuilt from its arguments."""
        try:
            return cloudpickle.loads(self.pickled)
        except Exception:  # also for no bytes
            return None


def as_value(value: Any, rank: int) -> Value:
    """Returns a value as the outcome of a rank. Raises `ArgumentTypeError` if it has no pickle."""
    kind = type(value).__qualname__
    try:
        return Value(kind, cloudpickle.dumps(value))
    except Exception as error:  # pickling may raise anything
        raise errors.ArgumentTypeError(
            f"[rank {rank}]",
            "a return value that can be pickled",
            f"an object of type {kind} ({type(error).__name__}: {error})",
            "Return numbers or arrays, for example, and keep the object within the function.",
        ) from None


def is_consequence(error: BaseException) -> bool:
    """Returns whether an exception follows from the end of another rank."""
    kind = errors.RankLostError
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        text = "".join(traceback.format_exception_only(following))
        if f"{kind.__module__}.{kind.__name__}" in text:
            return True
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def as_failure(error: BaseException) -> Failure:
    """Returns an exception as the outcome of a rank."""
    # The first frame belongs to this file.
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # arguments of exceptions may be anything
        pickled = b""
    text = "".join(traceback.format_exception_only(error)).strip()
    return Failure(text, "".join(lines), pickled, is_consequence(error))


def raise_failure(
    outcomes: Sequence[Value | Failure | None], output_of: Callable[[int], str] = lambda rank: ""
) -> None:
    """Raises the original failure, if a rank has failed."""
    failed = [(rank, each) for rank, each in enumerate(outcomes) if isinstance(each, Failure)]
    if not failed:
        return
    rank, failure = min(failed, key=lambda pair: (pair[1].is_consequence, pair[1].moment))
    printed = output_of(rank) if rank else ""  # the output of the root was shown
    text = errors.explain(
        f"[rank {rank} of {len(outcomes)}]",
        "the function to return",
        failure.text,
        f"Traceback:\n{failure.traceback}" + (f"Output:\n{printed}" if printed else ""),
    )
    raise errors.RankError(text, rank, failure.traceback) from failure.error()


def value_of(outcome: Any, rank: int, np: int) -> Any:
    """Returns the value of a rank that has returned."""
    try:
        return cloudpickle.loads(outcome.pickled)
    except Exception as error:  # unpickling may raise anything
        raise errors.RankError(
            errors.explain(
                f"[rank {rank} of {np}]",
                "a return value that can be unpickled here",
                f"an object of type {outcome.kind} ({type(error).__name__}: {error})",
                "Return numbers or arrays, for example.",
            ),
            rank,
        ) from error


def pickled(value: Any) -> bytes:
    """Returns `cloudpickle.dumps(value)`, from which code is loaded with its file name."""
    # cloudpickle 3.1.3 and later replace it by `"<dynamic-code>"`: a traceback of another process
    # would show no line of a cell or of a script.
    file = io.BytesIO()
    _CodePickler(file).dump(value)
    return file.getvalue()


def with_file(name: str, make: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    """Returns code with a file name, from what cloudpickle reduces it to."""
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=name)


def _reduced(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _of_cloudpickle[types.CodeType](code)
    return with_file, (code.co_filename, make, arguments)


_of_cloudpickle: Any = cloudpickle.Pickler.dispatch_table
_with_files = collections.ChainMap({types.CodeType: _reduced}, _of_cloudpickle)


class _CodePickler(cloudpickle.Pickler):
    dispatch_table = _with_files


class JobFiles:
    """The files through which a caller and its ranks communicate, in a private directory.

    ```
    call         caller    function and arguments; variables, import path, sources of cells
    log-1        rank 1    output
    report-1     rank 1    progress as JSON, rewritten repeatedly
    value-1      rank 1    return value of the function
    failure-1    rank 1    exception that ended the rank
    ```

    Only the caller and its own ranks write what is unpickled; there is no port.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def log(self, rank: int) -> pathlib.Path:
        """Returns the output file of a rank."""
        return self.folder / f"log-{rank}"

    def put_call(self, call: Any) -> None:
        """Writes the call. Raises whatever cloudpickle raises."""
        self._put("call", cloudpickle.dumps(call))

    def call(self) -> Any:
        return pickle.loads((self.folder / "call").read_bytes())

    def put_outcome(self, rank: int, outcome: Value | Failure) -> None:
        name = "value" if isinstance(outcome, Value) else "failure"
        self._put(f"{name}-{rank}", pickle.dumps(outcome))

    def outcome(self, rank: int) -> Value | Failure | None:
        """Returns the failure or the value of a rank; `None` while it has none."""
        for name in ("failure", "value"):
            path = self.folder / f"{name}-{rank}"
            with contextlib.suppress(FileNotFoundError):
                found: Value | Failure = pickle.loads(path.read_bytes())
                if isinstance(found, Failure):  # by one clock: those of hosts may differ
                    return dataclasses.replace(found, moment=path.stat().st_mtime)
                return found
        return None

    def tail(self, rank: int) -> str:
        """Returns the last lines of the output of a rank."""
        path = self.log(rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-SHOWN_LINES:])

    def put_report(self, rank: int, report: Report) -> None:
        """Writes the progress of a rank as JSON; the report may say another one, after losses."""
        self._put(f"report-{rank}", json.dumps(report.to_fields()).encode())

    def report(self, rank: int) -> Report:
        """Returns the latest progress of a rank."""
        try:
            report = Report.from_fields(json.loads((self.folder / f"report-{rank}").read_bytes()))
        except FileNotFoundError:
            report = Report(rank, host="", pid=0, time=0.0, state="starting")
        state = report.state or "running"
        if (self.folder / f"failure-{rank}").exists():
            state = "failed"
        elif (self.folder / f"value-{rank}").exists():
            state = "returned"
        return dataclasses.replace(report, rank=rank, state=state, waits_in="", age=0.0)

    def _put(self, name: str, content: bytes) -> None:
        """Writes a file atomically, without waiting for the disk."""
        with atomic_write.beside(self.folder / name) as path:
            path.touch(0o600)
            path.write_bytes(content)
            os.replace(path, self.folder / name)
