"""Timelines of jobs that fail or are restarted, and other users who watch a job."""

import pytest
import traces

from keras_dist.launch.cli import main


@pytest.mark.fault(
    "a rank is killed while a timeline is recorded",
    "its file is a valid trace; `keras-dist timeline` merges the recordings of the ranks",
    within=5,
)
def test_a_trace_is_whole_after_a_kill_at_any_moment(job, tmp_path, capsys):
    path = tmp_path / "t.json"
    for _ in range(3):
        job(2, "observed.py", "killed_at_any_moment", KERAS_DIST_TIMELINE=path).failed()
        traces.load(path)
        assert main(["timeline", str(path)]) == 0
        assert "Rank 1 did not end its recording: it was killed." in capsys.readouterr().out
        trace = traces.load(path)
        assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}


def test_parts_on_other_nodes_are_sent_to_the_root(job, tmp_path):
    names = {"HOROVOD_TIMELINE": "deep/t.json", "KERAS_DIST_RESTART": "2"}
    ended = job(4, "observed.py", "apart", tmp_path, MPIR_CVAR_NUM_CLIQUES="2", **names)
    assert ended.returncode == 0, ended.stdout
    assert [(tmp_path / rank / "other").read_text() for rank in "01"] == ["mine"] * 2
    left = [path.relative_to(tmp_path) for path in tmp_path.glob("[0-3]/deep/*")]
    assert [str(path) for path in left] == ["0/deep/t.restart2.json"]
    trace = traces.load(tmp_path / left[0])
    by_hand = traces.bars(trace, "allreduce 'by hand'")
    assert [bar["pid"] for bar in sorted(by_hand, key=lambda bar: bar["pid"])] == [0, 1, 2, 3]
    assert by_hand[0]["args"]["bytes"] == 8_000_000
    assert {bar["pid"] for bar in traces.bars(trace, "cross-node")} == {0, 1, 2, 3}
    about = trace["otherData"]["keras_dist"]["ranks"]
    assert all(len(said["clock_error_us"]) == 2 and said["ended"] for said in about)


def test_a_timeline_that_cannot_be_written_is_an_error_on_every_rank(job):
    ended = job(2, "meeting.py", KERAS_DIST_TIMELINE="/proc/t.json")
    ended.failed("[rank 0 of 2] Expected to write a timeline to /proc/t.json. Received: ")


def test_ranks_that_go_on_without_another_end_their_timeline(go_on, tmp_path):
    path = tmp_path / "t.json"
    go_on(3, "observed.py", "without_another", KERAS_DIST_TIMELINE=path).succeeded()
    trace = traces.load(path)
    ended = {said["rank"]: said["ended"] for said in trace["otherData"]["keras_dist"]["ranks"]}
    assert ended == {0: True, 1: False, 2: True}
    for rank in (0, 2):
        assert len(traces.bars(trace, "allreduce 'gradients'", rank)) == 20


@pytest.mark.fault(
    "another user of the node sends a request to the port for Prometheus",
    "401 without the token, which only the owner of the job can read",
    within=10,
)
def test_a_stranger_asks_at_the_port(job, tmp_path, free_port):
    where = {"KERAS_DIST_PROMETHEUS_PORT": free_port, "XDG_RUNTIME_DIR": tmp_path}
    ended = job(2, "observed.py", "asked_by_a_stranger", **where)
    ended.succeeded("refused: 401 b'A token is required.\\n'")
