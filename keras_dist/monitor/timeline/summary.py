"""The summary of a timeline: how ranks, epochs and operations spent their time."""

import bisect
import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_dist import errors
from keras_dist.monitor.timeline.trace import (
    BEHIND,
    COMMUNICATION,
    COMPUTE,
    EPOCH,
    KEY,
    PENDING,
    STEP,
    WAIT,
    complete,
    damaged,
    parts_of,
)

THE_END = "the end of the script"  # waiting at the end has no cost
KINDS = {
    "compute": "steps without communication",
    "wait": "for other ranks",
    "transfer": "the rest of the operations",
    "queued": "for queued operations and the GPU",
    "other": "outside steps: data, callbacks, evaluation",
}


@dataclasses.dataclass
class Shares:
    """How a rank spent a period, in seconds."""

    total: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    queued: float = 0.0

    @property
    def other(self) -> float:
        """The remaining time: data, callbacks, evaluation, and custom loops."""
        return max(0.0, self.total - self.compute - self.wait - self.transfer - self.queued)

    def part(self, kind: str) -> float:
        """Returns the ratio of one of `KINDS`, 0 to 1."""
        return getattr(self, kind) / self.total if self.total else 0.0


@dataclasses.dataclass
class Operation:
    """All operations of one name, such as a bucket of gradients; times are sums in seconds."""

    name: str
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Rate in GB/s after the rendezvous."""
        busy = self.seconds - self.phases.get(WAIT, 0.0)
        return self.nbytes / busy / 1e9 if busy > 0 else 0.0


@dataclasses.dataclass
class Summary:
    """The summary of a trace."""

    ranks: dict[int, Shares]
    steps: dict[int, Shares]  # a typical step of each rank; empty for custom loops
    epochs: list[tuple[int, Shares]]
    operations: list[Operation]
    last: dict[int, int]
    waited_for: dict[int, float]  # seconds that other ranks waited for a rank, in total
    about: list[dict[str, Any]]

    @property
    def slowest(self) -> int | None:
        """The rank for which others waited longest; `None` if no rank waited."""
        return max(self.waited_for, key=self.waited_for.__getitem__, default=None)


def _load(path: str) -> dict[str, Any]:
    """Reads a trace; for a killed job, merges the recordings of the ranks first."""
    try:
        trace: dict[str, Any] = json.loads(Path(path).read_text())
        metadata = trace["otherData"][KEY]
        if not metadata["complete"] and parts_of(path, metadata["job"]):
            complete(path, metadata["job"], by_reader=True)
            trace = json.loads(Path(path).read_text())
        if "ranks" not in trace["otherData"][KEY]:
            raise damaged(path, "a job that did not end, without the recordings of its ranks")
    except errors.DataError:
        raise
    except (KeyError, IndexError, TypeError):
        raise damaged(path, "JSON of another program") from None
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from None
    return trace


def summarise(path: str) -> Summary:
    """Reads a trace, of a killed job as well, and summarizes it."""
    trace = _load(path)
    try:
        return _summarise(trace)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        received = f"events without what keras_dist writes ({type(error).__name__}: {error})"
        raise damaged(path, received) from None


def _summarise(trace: Mapping[str, Any]) -> Summary:
    events = trace["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    about = trace["otherData"][KEY]["ranks"]
    ranks = {metadata["rank"]: Shares() for metadata in about}
    epochs = {rank: _Periods(bars, rank, EPOCH) for rank in ranks}
    steps = {rank: _Periods(bars, rank, STEP) for rank in ranks}
    operations: dict[str, Operation] = {}
    last: collections.Counter[int] = collections.Counter()
    waited_for: dict[int, float] = collections.defaultdict(float)
    for bar, operation in _with_operation(bars, lanes):
        rank, seconds = bar["pid"], bar["dur"] / 1e6
        if operation is not None:
            found = operations.setdefault(operation["name"], Operation(operation["name"]))
            if bar is operation:
                found.calls += 1
                found.nbytes += bar["args"]["bytes"]
                found.seconds += seconds
                found.queued += bar["args"].get("queue_us", 0) / 1e6
            else:
                name = bar["name"]
                found.phases[name] = found.phases.get(name, 0.0) + seconds
        if bar["name"] == WAIT and "last" in bar.get("args", ()):
            slow = bar["args"]["last"]
            if slow == rank:
                last[rank] += 1
            else:
                waited_for[slow] += bar["args"]["late_us"] / 1e6
        is_behind = lanes[rank, bar["tid"]].endswith(BEHIND)
        for shares in (ranks[rank], epochs[rank].at(bar["ts"]), steps[rank].at(bar["ts"])):
            _add(shares, bar, bar is operation, is_behind)
    for rank, shares in ranks.items():
        mine = [bar for bar in bars if bar["pid"] == rank and bar["name"] != THE_END]
        if mine:
            shares.total = (max(b["ts"] + b["dur"] for b in mine) - mine[0]["ts"]) / 1e6
    by_cost = sorted(operations.values(), key=lambda item: item.seconds, reverse=True)
    means = _mean_epochs(list(epochs.values()))
    typical = {rank: _typical(found.shares) for rank, found in steps.items() if found.shares}
    return Summary(ranks, typical, means, by_cost, dict(last), dict(waited_for), about)


def _with_operation(
    bars: Iterable[dict[str, Any]], lanes: Mapping[tuple[int, int], str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yields each bar with its operation, if it is one or a phase of one."""
    running: dict[tuple[int, int], dict[str, Any]] = {}
    for bar in bars:
        lane = bar["pid"], bar["tid"]
        operation = None
        if lanes[lane].startswith(COMMUNICATION):
            if "bytes" in bar.get("args", ()):
                running[lane] = bar
            operation = running[lane]
            if operation["name"] == THE_END:
                continue
        yield bar, operation


def _add(shares: Shares | None, bar: Mapping[str, Any], is_operation: bool, behind: bool) -> None:
    seconds = bar["dur"] / 1e6
    if shares is None or behind:
        return
    if is_operation:
        shares.transfer += seconds
    elif bar["name"] == WAIT:
        shares.wait += seconds
        shares.transfer -= seconds
    elif bar["name"] == COMPUTE:
        shares.compute += seconds
    elif bar["name"] in PENDING:
        shares.queued += seconds


class _Periods:
    """The epochs or the steps of one rank, in order."""

    def __init__(self, bars: Iterable[Mapping[str, Any]], rank: int, name: str):
        mine = [bar for bar in bars if bar["pid"] == rank and bar["name"] == name]
        self._begins = [bar["ts"] for bar in mine]
        self._ends = [bar["ts"] + bar["dur"] for bar in mine]
        self.numbers = [bar["args"]["number"] + 1 for bar in mine]
        self.shares = [Shares(total=bar["dur"] / 1e6) for bar in mine]

    def at(self, time: float) -> Shares | None:
        """Returns the shares of the period at a time."""
        index = bisect.bisect_right(self._begins, time) - 1
        return self.shares[index] if index >= 0 and time < self._ends[index] else None


def _mean_epochs(every: list[_Periods]) -> list[tuple[int, Shares]]:
    numbers = every[0].numbers if every else []
    by_epoch = zip(numbers, *(periods.shares for periods in every), strict=False)
    return [(number, _mean(shares)) for number, *shares in by_epoch]


def _typical(steps: list[Shares]) -> Shares:
    """Returns the mean of the middle half by duration: some steps compile, save or validate."""
    steps = sorted(steps, key=lambda shares: shares.total)
    aside = len(steps) // 4
    return _mean(steps[aside : len(steps) - aside])


def _mean(every: list[Shares]) -> Shares:
    names = [field.name for field in dataclasses.fields(Shares)]
    return Shares(**{name: sum(getattr(one, name) for one in every) / len(every) for name in names})
