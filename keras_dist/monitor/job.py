"""The state of a job: the reports of its ranks, and totals over them.

Independent of how reports arrive and how they are shown. Imports no engine.
"""

import dataclasses
import json

from keras_dist.monitor.report import Report

SLOW_SHARE = 0.05  # the slowest rank waits less than others by this ratio


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank.

    Args:
        age: seconds since that report was requested; `None` before the first answer.
    """

    report: Report
    age: float | None


@dataclasses.dataclass(frozen=True)
class Job:
    """The state of a job at one time.

    Args:
        started: when the ranks joined, in seconds since 1970.
    """

    name: str
    host: str
    pid: int
    started: float
    time: float
    rows: list[Row]
    note: str = ""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len({row.report.host for row in self.rows})

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of all ranks, if every rank reports them."""
        speeds = [row.report.samples_per_second for row in self.rows]
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
        rows = [{**json.loads(row.report.to_json()), "age": row.age} for row in self.rows]
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
            "ranks": rows,
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Returns the job that a line stands for."""
        try:
            found = json.loads(text)
            rows = [Row(Report.from_json(json.dumps(row)), row["age"]) for row in found["ranks"]]
            moments = found["started"], found["time"]
            return cls(found["job"], found["host"], found["pid"], *moments, rows, found["note"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no job: {error!r}") from None

    def _waiting(self) -> dict[int, float]:
        shares = {row.report.rank: row.report.waiting for row in self.rows}
        return {rank: share for rank, share in shares.items() if share is not None}
