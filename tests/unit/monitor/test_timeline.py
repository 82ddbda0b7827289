"""Timelines without a job: merged traces, reports, and damaged files."""

import itertools
import json
import os
import re
import sys

import pytest
import traces
from hypothesis import given
from hypothesis import strategies as st
from traces import EPOCH, HANDLE, STEP, bars, operation, write_part

from keras_dist import _engine
from keras_dist.launch.cli import main
from keras_dist.monitor.timeline.summary import summarise
from keras_dist.monitor.timeline.trace import BEHIND, begin_trace, complete

MS = 1_000_000
QUEUED = 2  # the lane of queued operations


def two_ranks(path, **options):
    """Writes the traces of two ranks: a step of 10 ms each; rank 1 is 3 ms late.

    The clock of rank 1 is 5 s ahead.
    """
    begin_trace(str(path), "j")
    for rank, arrived in enumerate((3 * MS, 6 * MS)):
        ahead = 5000 * MS * rank
        times = (2 * MS, 2 * MS, 8 * MS, arrived, 6 * MS)
        records = [
            [2, 0, EPOCH, ahead, ahead, 0],
            operation(*(ahead + time for time in times)),
            [1, 0, STEP, ahead, ahead + 10 * MS, 0],
            [1, 0, EPOCH, ahead, ahead + 11 * MS, 0],
        ]
        write_part(path, rank, records, ahead, **options)
    return path


def test_parts_become_a_trace_with_one_clock(tmp_path):
    path = two_ranks(tmp_path / "t.json")
    assert complete(str(path), "another") == []  # parts of another job are left alone
    assert json.loads(path.read_text())["otherData"]["keras_dist"]["complete"] is False
    complete(str(path), "j")
    trace = traces.load(path)
    assert trace["otherData"]["keras_dist"]["complete"] is True
    steps = bars(trace, "step")
    assert [(step["pid"], step["ts"], step["dur"]) for step in steps] == [(0, 0, 1e4), (1, 0, 1e4)]
    for rank in (0, 1):
        parts = [(bar["ts"], bar["dur"]) for bar in bars(trace, "compute", rank)]
        assert parts == [(0, 2000), (8000, 2000)]
    waits = bars(trace, "wait for ranks")
    assert [wait["args"] for wait in waits] == [
        {"last": 1, "late_us": 3000.0},
        {"last": 1, "late_us": 0.0},
    ]
    (operation_of_root,) = bars(trace, "gradients", 0)
    assert operation_of_root["args"] == {"bytes": 1000, "arrays": "kernel", "GB/s": 0.000333}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 on node0", "rank 1 on node1"]


def test_a_link_where_files_are_made_is_not_followed(tmp_path):
    other, path = tmp_path / "other", tmp_path / "t.json"
    other.write_text("mine")
    part = tmp_path / "t.json.rank0.part"
    for link in (part, tmp_path / f"t.json.{os.getpid()}.tmp"):  # predictable names
        link.symlink_to(other)
    begin_trace(str(path), "j")
    os.close(_engine.tracing.open_trace(str(part)))
    assert other.read_text() == "mine"
    assert not path.is_symlink()
    assert not part.is_symlink()


def test_a_clock_that_drifts_is_interpolated(tmp_path):
    path = tmp_path / "t.json"
    head_and_end = {"clock": (0, 1000 * MS)}
    write_part(path, 0, [[1, 0, STEP, 500 * MS, 600 * MS, 0]], **head_and_end)
    part = path.with_name("t.json.rank0.part")
    *lines, _ = part.read_text().splitlines()
    ahead = json.dumps({"end": True, "clock": [1001 * MS, 1 * MS, 10]})
    part.write_text("\n".join([*lines, ahead]) + "\n")
    complete(str(path), "j")
    (step,) = bars(traces.load(path), "step")
    assert step["ts"] == pytest.approx(499_500, abs=1)


def test_a_summary_says_where_the_time_went(tmp_path):
    summary = summarise(str(two_ranks(tmp_path / "t.json")))
    first, second = summary.ranks[0], summary.ranks[1]
    assert (first.compute, first.wait, first.transfer) == pytest.approx((0.004, 0.003, 0.003))
    assert (second.compute, second.wait, second.transfer) == pytest.approx((0.004, 0.0, 0.006))
    assert first.total == second.total == pytest.approx(0.011)
    assert [step.total for step in summary.steps.values()] == pytest.approx([0.01, 0.01])
    assert [step.wait for step in summary.steps.values()] == pytest.approx([0.003, 0])
    ((number, epoch),) = summary.epochs
    assert (number, epoch.total, epoch.wait) == pytest.approx((1, 0.011, 0.0015))
    assert summary.slowest == 1
    assert summary.last == {1: 1}
    assert summary.waited_for == {1: pytest.approx(0.003)}
    (gradients,) = summary.operations
    assert (gradients.calls, gradients.nbytes) == (2, 2000)
    assert gradients.phases["wait for ranks"] == pytest.approx(0.003)


def test_a_step_that_compiles_is_no_typical_step(tmp_path):
    path = tmp_path / "t.json"
    begin_trace(str(path), "j")
    ends = [0, 900, 904, 910, 918]
    steps = [[1, 0, STEP, low * MS, high * MS, 0] for low, high in itertools.pairwise(ends)]
    write_part(path, 0, steps)
    typical = summarise(str(path)).steps[0]
    assert (typical.total, typical.compute) == pytest.approx((0.007, 0.007))


def test_what_runs_behind_the_script_leaves_it_computing(tmp_path):
    path = tmp_path / "t.json"
    records = [
        operation(MS, 2 * MS, 8 * MS, 3 * MS, 4 * MS, lane=QUEUED),
        [1, 0, HANDLE, 7 * MS, 8 * MS, 0],
        [1, 0, STEP, 0, 10 * MS, 0],
    ]
    begin_trace(str(path), "j")
    write_part(path, 0, records)
    summary = summarise(str(path))
    mine = summary.ranks[0]
    assert (mine.compute, mine.queued, mine.wait) == pytest.approx((0.009, 0.001, 0))
    trace = traces.load(path)
    (queue,) = [event for event in trace["traceEvents"] if event["ph"] == "b"]
    assert (queue["name"], queue["ts"]) == ("queue", 1000)
    assert traces.lanes_of(trace)[0, QUEUED].endswith(BEHIND)


times = st.lists(st.integers(0, 20 * MS), min_size=5, max_size=5).map(sorted)


@given(st.lists(times, max_size=5), st.integers(-(10**15), 10**15))
def test_any_operations_and_clock_make_a_trace_that_keeps_the_rules(tmp_path_factory, found, ahead):
    path = tmp_path_factory.mktemp("trace") / "t.json"
    one_after_the_other, at = [], 0
    for came, began, arrived, met, ended in found:
        moved = (at + time + ahead for time in (came, began, ended, arrived, met))
        one_after_the_other.append(operation(*moved))
        at += ended
    begin, end = ahead + at // 4, ahead + at + MS
    records = [*one_after_the_other, [1, 0, STEP, begin, end, 0]]
    write_part(path, 0, records, ahead)
    complete(str(path), "j")
    trace = traces.load(path)
    (step,) = bars(trace, "step")
    in_step = sum(
        max(0, min(o["ts"] + o["dur"], step["ts"] + step["dur"]) - max(o["ts"], step["ts"]))
        for o in bars(trace, "gradients")
    )
    computed = sum(bar["dur"] for bar in bars(trace, "compute"))
    assert computed + in_step == pytest.approx(step["dur"], abs=0.1)


def test_the_part_of_a_killed_rank_may_end_anywhere(tmp_path):
    path = two_ranks(tmp_path / "t.json", end=False)
    part = path.with_name("t.json.rank1.part")
    whole = part.read_bytes()
    head = whole.index(b"\n") + 1
    for cut in range(0, len(whole), 3):
        part.write_bytes(whole[:cut])
        about = complete(str(path), "j")
        traces.load(path)
        assert [said["rank"] for said in about] == ([0, 1] if cut >= head else [0])
        assert not any(said["ended"] for said in about)
    assert part.exists()  # the job may still be running
    # Its epoch has not ended.
    part.write_bytes(whole[: whole.rindex(b"[1, 0, 1")])
    complete(str(path), "j")
    (epoch,) = bars(traces.load(path), "epoch", rank=1)
    assert epoch["args"]["unfinished"] is True
    assert epoch["dur"] == 10_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ('{"traceEvents": [', "Expecting value"),
        ("[]", "JSON of another program"),
        ('{"traceEvents": []}', "JSON of another program"),
        (
            '{"otherData": {"keras_dist": {"job": "j", "complete": false}}}',
            "without the recordings",
        ),
        (
            '{"otherData": {"keras_dist": {"job": "j", "complete": true, "ranks": []}},'
            '"traceEvents": [{"ph": "X"}]}',
            "events without what keras_dist writes (KeyError: 'name')",
        ),
        (b"\xff\xfe\x00", "codec can't decode"),
    ],
)
def test_a_damaged_file_is_a_short_error(tmp_path, capsys, text, reason):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["timeline", str(path)]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_a_damaged_part_is_named(tmp_path, capsys):
    path = two_ranks(tmp_path / "t.json")
    part = path.with_name("t.json.rank0.part")
    lines = part.read_text().splitlines(True)
    part.write_text("".join([*lines[:4], "[1, 2\n", *lines[4:]]))
    assert main(["timeline", str(path)]) == 2
    assert f"{part}. Received: line 5 is not" in capsys.readouterr().err


def test_the_report_as_text_page_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    path = two_ranks(tmp_path / "t.json")
    page, figure = tmp_path / "t.html", tmp_path / "t.png"
    options = ["--html", str(page), "--png", str(figure)]
    assert main(["timeline", str(path), str(path), *options]) == 0
    said, shown = capsys.readouterr().out, page.read_text()
    for text in (
        "0 on node0",
        "40.0%",
        "36.4%",
        "gradients",
        "Slowest: rank 1. It came last to 1 of 1 collectives",
    ):
        assert said.count(text) == shown.count(text) > 0, text
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", str(path), "--html", str(tmp_path / "no" / "t.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", str(path), "--png", str(figure)]) == 2
    assert "pip install 'keras_dist[timeline]'" in capsys.readouterr().err


def test_a_page_needs_no_other_file_and_reads_as_text(tmp_path, capsys):
    path, page = two_ranks(tmp_path / "t.json", name="loss[/train]<b>"), tmp_path / "t.html"
    assert main(["timeline", str(path), "--html", str(page)]) == 0
    text = page.read_text()
    rows = re.findall(r"<tr>(.*?)(?=<tr|<tbody|</table)", text, re.DOTALL)  # bars are hidden
    assert [re.split(r"<t[hd][^>]*>", row.strip())[1:] for row in rows[:3]] == [
        ["step of rank", "ms", "compute", "wait", "transfer", "queued", "other"],
        ["0 on node0", "10.00", "40.0%", "30.0%", "30.0%", "0.0%", "0.0%"],
        ["1 on node1", "10.00", "40.0%", "0.0%", "60.0%", "0.0%", "0.0%"],
    ]
    assert not re.search(r"src=|href=|url\(|@import", text)
    # Names are no markup.
    assert "loss[/train]<b>" in capsys.readouterr().out and "loss[/train]&lt;b&gt;" in text
