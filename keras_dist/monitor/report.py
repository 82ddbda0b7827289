"""What a rank says of itself: where it is in training, how fast, how long it waits, what it uses.

A report costs some 100 microseconds and asks no other rank. Knows no way on which it travels; as
JSON it can be read by whoever has no keras_dist. Those who only read reports load no engine.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_dist.monitor.gpu import Gpu, gpu_of

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

__all__ = ["Report", "of_this_process", "of_this_rank", "take_sample"]

WINDOW_SECONDS = 10.0  # speeds are those of so long


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank says of itself. What is not known is `None`.

    Args:
        rank: its number in the job.
        host: the name of its node.
        pid: its process there.
        time: when it was made, seconds since 1970.
        state: `"fit"`, `"evaluate within fit"`, `"after fit"` and the like, or `""`.
        epoch: from 1, as Keras prints it.
        epochs: up to which one is trained.
        step: of the epoch, from 1; updates where no callback counts steps.
        steps: how many the epoch has.
        done: steps since the process began.
        steps_per_second: of the last 10 seconds.
        samples_per_second: of this rank, from the second epoch of a fit on.
        waiting: from 0 to 1, the share of the last 10 seconds in which it waited for others.
        waited_seconds: since the process began.
        waits_in: the collective that it waits in now, with how many seconds; or `""`.
        logs: what Keras last said of metrics, by name.
        memory_nbytes: resident memory of the process.
        gpu: its GPU.
    """

    rank: int
    host: str
    pid: int
    time: float
    state: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    done: int = 0
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    waiting: float | None = None
    waited_seconds: float = 0.0
    waits_in: str = ""
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_nbytes: int | None = None
    gpu: Gpu | None = None

    def to_json(self) -> str:
        """Returns one line of JSON; what is no finite number in `logs` is a text, as `"nan"`."""
        fields = dataclasses.asdict(self)
        fields["logs"] = {
            name: value if math.isfinite(value) else str(value) for name, value in self.logs.items()
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Returns the report that a line stands for; fields it does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in json.loads(text).items() if name in known}
        fields["logs"] = {name: float(value) for name, value in fields.get("logs", {}).items()}
        if fields.get("gpu") is not None:
            fields["gpu"] = Gpu(**fields["gpu"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class _Sample:
    moment: float
    done: int
    waited: float


_samples: deque[_Sample] = deque()  # of the last seconds, and one from before


def take_sample() -> None:
    """Notes how far this rank is, for speeds: a few microseconds, once a second is often enough."""
    from keras_dist import _engine

    now = time.perf_counter()
    ongoing = max((now - began for _, _, began in _engine.waits()), default=0.0)
    sample = _Sample(now, _engine.progress().done, _engine.waited_seconds() + ongoing)
    _samples.append(sample)
    while len(_samples) > 2 and _samples[1].moment < now - WINDOW_SECONDS:
        _samples.popleft()


def of_this_process(rank: int) -> Report:
    """Returns what can be said before this process has joined others.

    Args:
        rank: its number in the job.
    """
    host, pid = os.uname().nodename, os.getpid()
    return Report(rank, host, pid, time.time(), memory_nbytes=_memory())


def of_this_rank(comm: "Communicator | None" = None) -> Report:
    """Returns what this rank says of itself now. Any thread may ask.

    Args:
        comm: the ranks of the job. Defaults to those that `keras_dist.init` has joined.
    """
    from keras_dist import _engine, runtime

    comm = comm or runtime.communicator()
    take_sample()
    first, latest, noted = _samples[0], _samples[-1], _engine.progress()
    seconds = latest.moment - first.moment
    speed = waiting = samples = None
    if seconds > 0:
        speed = max(latest.done - first.done, 0) / seconds
        waiting = min(max(latest.waited - first.waited, 0.0) / seconds, 1.0)
        if noted.samples_per_step is not None:
            samples = speed * noted.samples_per_step
    return dataclasses.replace(
        of_this_process(comm.rank),
        state=noted.task,
        epoch=None if noted.epoch is None else noted.epoch + 1,
        epochs=noted.epochs,
        step=noted.updates or None if noted.step is None else noted.step,
        steps=noted.steps,
        done=noted.done,
        steps_per_second=speed,
        samples_per_second=samples,
        waiting=waiting,
        waited_seconds=latest.waited,
        waits_in=_say_wait(),
        logs=_numbers(dict(noted.logs)),
        gpu=gpu_of(comm.local_rank),
    )


def _say_wait() -> str:
    from keras_dist import _engine

    now = time.perf_counter()
    waits = [(began, call) for _, call, began in _engine.waits() if now - began > 1]
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
