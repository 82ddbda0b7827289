"""The report of a rank: progress, speed, waits and resources; and the job, all reports together.

A report takes about 100 microseconds and requires no communication. The JSON form can be read
without keras_dist, and readers of reports do not import the engine.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_dist.monitor.gpu import Gpu, gpu_of

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

WINDOW_SECONDS = 10.0  # over which rates are computed
SLOW_SHARE = 0.05  # the slowest rank waits less than others by this ratio
SILENT_SECONDS = 5.0  # a rank with an older report does not answer


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a rank. `None` means unknown."""

    rank: int
    host: str
    pid: int
    time: float  # in seconds since 1970
    state: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    done: int = 0
    steps_per_second: float | None = None  # over the last 10 seconds
    samples_per_second: float | None = None
    waiting: float | None = None  # for other ranks, ratio of the last 10 seconds, 0 to 1
    waited_seconds: float = 0.0  # since the start of the process
    waits_in: str = ""  # the collective in which it waits now, with seconds
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_nbytes: int | None = None  # resident
    gpu: Gpu | None = None
    age: float | None = None  # seconds since the root requested it; `None`: no answer yet

    @property
    def is_silent(self) -> bool:
        """Whether the rank does not answer."""
        return self.age is None or self.age > SILENT_SECONDS

    def cells(self) -> dict[str, str]:
        """Returns the texts for a row of a table, by the heads of its columns."""
        state = f"waits in {self.waits_in}" if self.waits_in else self.state
        if self.age is None:
            state = "has not answered"
        elif self.is_silent:
            state = f"no answer for {self.age:.0f} s"
        gpu = self.gpu
        use = "" if gpu is None or gpu.use is None else f"{gpu.use:.0%}"
        return {
            "rank": str(self.rank),
            "host": self.host,
            "pid": str(self.pid or ""),
            "state": state,
            "epoch": _of(self.epoch, self.epochs),
            "step": _of(self.step, self.steps),
            "steps/s": _rounded(self.steps_per_second),
            "samples/s": _rounded(self.samples_per_second),
            "waiting": "" if self.waiting is None else f"{self.waiting:.0%}",
            "memory": _gib(self.memory_nbytes),
            "GPU": f"{gpu.place} {use}".strip() if gpu else "",
            "GPU memory": _gib(gpu.memory_nbytes if gpu else None),
        }

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for JSON; in `logs`, values that are not finite become text."""
        fields = dataclasses.asdict(self)
        fields["logs"] = {
            name: value if math.isfinite(value) else str(value) for name, value in self.logs.items()
        }
        return fields

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> "Report":
        """Returns the report that fields stand for; unknown fields are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in found.items() if name in known}
        fields["logs"] = {name: float(value) for name, value in fields.get("logs", {}).items()}
        if fields.get("gpu") is not None:
            fields["gpu"] = Gpu(**fields["gpu"])
        return cls(**fields)


def _of(number: int | None, total: int | None) -> str:
    if number is None:
        return ""
    return str(number) if total is None else f"{number}/{total}"


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


@dataclasses.dataclass(frozen=True)
class Job:
    """The state of a job at one time."""

    name: str
    host: str
    pid: int
    started: float  # when the ranks joined, in seconds since 1970
    time: float
    rows: list[Report]  # by rank
    note: str = ""

    @property
    def nodes(self) -> int:
        return len({report.host for report in self.rows})

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of all ranks, if every rank reports them."""
        speeds = [report.samples_per_second for report in self.rows]
        known = [speed for speed in speeds if speed is not None]
        return sum(known) if len(known) == len(speeds) else None

    @property
    def waiting(self) -> float | None:
        """Mean ratio of time in which ranks wait for others."""
        known = self._waiting().values()
        return sum(known) / len(known) if known else None

    @property
    def slowest(self) -> int | None:
        """The rank that waits least, if others wait clearly more; they wait for it."""
        known = self._waiting()
        if not known or max(known.values()) - min(known.values()) < SLOW_SHARE:
            return None
        return min(known, key=lambda rank: known[rank])

    def to_json(self) -> str:
        """Returns one line of JSON, with what follows from the reports."""
        fields = {
            "job": self.name,
            "host": self.host,
            "pid": self.pid,
            "started": self.started,
            "time": self.time,
            "nodes": self.nodes,
            "samples_per_second": self.samples_per_second,
            "waiting": self.waiting,
            "slowest": self.slowest,
            "note": self.note,
            "ranks": [report.to_fields() for report in self.rows],
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Returns the job that a line stands for."""
        try:
            found = json.loads(text)
            rows = [Report.from_fields(row) for row in found["ranks"]]
            moments = found["started"], found["time"]
            return cls(found["job"], found["host"], found["pid"], *moments, rows, found["note"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no job: {error!r}") from None

    def _waiting(self) -> dict[int, float]:
        shares = {report.rank: report.waiting for report in self.rows}
        return {rank: share for rank, share in shares.items() if share is not None}


@dataclasses.dataclass(frozen=True)
class _Sample:
    moment: float
    done: int
    waited: float


_samples: deque[_Sample] = deque()  # of the window, and one older sample


def take_sample() -> None:
    """Records the progress of this rank, from which rates follow. Takes a few microseconds."""
    from keras_dist import _engine

    now = time.perf_counter()
    ongoing = max((now - began for _, _, began in _engine.wait.waits()), default=0.0)
    sample = _Sample(now, _engine.progress.done(), _engine.wait.waited_seconds() + ongoing)
    _samples.append(sample)
    while len(_samples) > 2 and _samples[1].moment < now - WINDOW_SECONDS:
        _samples.popleft()


def of_this_process(rank: int) -> Report:
    """Returns the report of a process that has not joined a job yet."""
    host, pid = os.uname().nodename, os.getpid()
    return Report(rank, host, pid, time.time(), memory_nbytes=_memory())


def of_this_rank(comm: "Communicator | None" = None) -> Report:
    """Returns the current report of this rank. Any thread may call it."""
    from keras_dist import _engine, _gpu, runtime

    comm = comm or runtime.communicator()
    take_sample()
    first, latest, progress = _samples[0], _samples[-1], _engine.progress.progress()
    seconds = latest.moment - first.moment
    speed = waiting = samples = None
    if seconds > 0:
        speed = max(latest.done - first.done, 0) / seconds
        waiting = min(max(latest.waited - first.waited, 0.0) / seconds, 1.0)
        if progress.samples_per_step is not None:
            samples = speed * progress.samples_per_step
    return dataclasses.replace(
        of_this_process(comm.rank),
        state=progress.task,
        epoch=None if progress.epoch is None else progress.epoch + 1,
        epochs=progress.epochs,
        step=progress.updates or None if progress.step is None else progress.step,
        steps=progress.steps,
        done=latest.done,
        steps_per_second=speed,
        samples_per_second=samples,
        waiting=waiting,
        waited_seconds=latest.waited,
        waits_in=_wait_text(),
        logs=_numbers(dict(progress.logs)),
        gpu=gpu_of(comm.topology.local_rank, _gpu.selected_bus_id()),
    )


def _wait_text() -> str:
    from keras_dist import _engine

    now = time.perf_counter()
    waits = [(began, call) for _, call, began in _engine.wait.waits() if now - began > 1]
    return min((f"{call}, {now - began:.0f} s" for began, call in waits), default="")


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[str(name)] = float(value)
    return found


def _memory() -> int | None:
    path = Path("/proc/self/statm")
    if not path.exists():
        return None
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
