"""The rules of the trace event format, and sample traces of ranks."""

import json
import numbers

FIELDS = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "M": {"args"}, "b": {"ts", "id", "cat"}}
FIELDS["e"] = FIELDS["b"]
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def load(path):
    """Returns a valid trace."""
    trace = json.loads(path.read_text())
    check(trace)
    return trace


def check(trace):
    """Fails if a trace violates the format, or a viewer could not draw it."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    lanes, asynchronous = {}, {}
    for event in trace["traceEvents"]:
        kind = event["ph"]
        assert event.keys() >= {"name", "pid", "tid"} | FIELDS[kind], event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        for field in ("ts", "dur"):
            value = event.get(field, 0)
            assert isinstance(value, numbers.Real), event
            assert value >= 0, event
        if kind == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        elif kind == "M":
            assert event["name"] in METADATA
        elif kind in "be":
            asynchronous.setdefault((event["cat"], event["id"]), []).append(event)
    for ends in asynchronous.values():
        assert [event["ph"] for event in ends] == ["b", "e"], ends
        assert ends[0]["ts"] <= ends[1]["ts"], ends
    for bars in lanes.values():
        check_nesting(bars)


def check_nesting(bars):
    """Fails if two bars of a lane overlap without nesting; times in ns."""
    outer = []
    times = [(round(bar["ts"] * 1e3), round(bar["dur"] * 1e3), bar) for bar in bars]
    for low, nanoseconds, bar in sorted(times, key=lambda one: (one[0], -one[1])):
        high = low + nanoseconds
        while outer and outer[-1][0] <= low:
            outer.pop()
        assert not outer or high <= outer[-1][0], (bar, outer[-1][1])
        outer.append((high, bar))


def bars(trace, name=None, rank=None):
    """Returns the bars of a trace, by start time."""
    found = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and name in (None, event["name"]) and rank in (None, event["pid"])
    ]
    return sorted(found, key=lambda event: event["ts"])


def lanes_of(trace):
    """Returns the names of lanes by rank and number."""
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


NAMES = ["step", "epoch", "wait for ranks", "copy in", "wait for a queued operation"]
STEP, EPOCH, WAIT, COPY, HANDLE = range(5)
GRADIENTS = 5


def write_part(path, rank, records, offset=0, end=True, clock=(0, 3000), name="gradients"):
    """Writes a sample trace of a rank.

    Args:
        path: the trace.
        rank: its number.
        records: lists as the engine writes them; lane 0 is training, 1 communication, 2 queued
            operations.
        offset: offset of its clock in ns.
        end: whether the rank finished its trace.
        clock: times of the clock measurements at the start and the end, on the clock of rank 0.
        name: name of the operations.
    """
    head = {"job": "j", "rank": rank, "host": f"node{rank}", "pid": 7, "started": 0.0}
    head["clock"] = [clock[0] + offset, offset, 100]
    lanes = ["training", "communication", "communication, queued"]
    lines = [head]
    lines += [{"number": number, "name": name} for number, name in enumerate(NAMES)]
    lines += [{"number": GRADIENTS, "name": name, "bytes": 1000, "arrays": "kernel"}]
    lines += [{"lane": number, "name": name} for number, name in enumerate(lanes)]
    lines += records
    if end:
        lines += [{"end": True, "clock": [clock[1] + offset, offset, 100]}]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    path.with_name(f"{path.name}.rank{rank}.part").write_text(text)


def operation(came, began, ended, arrived, met, lane=1, meeting=1):
    """Returns an operation as the engine writes it, after a wait and a copy."""
    phases = [COPY, began, arrived, 0, WAIT, arrived, met, meeting]
    return [0, lane, GRADIENTS, came, began, ended, *phases]
