"""Point-to-point messages between two ranks, one of which makes another call or dies."""

import pytest


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "a rank sends a message that the other does not expect, or both send",
    "an error on both that names what differs; the job continues",
    within=20,
)
def test_a_rank_receives_something_else(job, way):
    printed = job(2, "calls.py", "different_messages", KERAS_DIST_REDUCE=way).succeeded()
    for both in (
        "[rank 1 of 2] Expected 'value' with shape (2, 3) as on rank 0. Received: (3, 2). Give",
        "[rank 1 of 2] Expected 'value' with dtype float64 as on rank 0. Received: float32. Give",
        "[rank 1 of 2] Expected name='a' in send('a') as on rank 0. Received: name='b'. Give both",
        "[rank 1 of 2] Expected recv from rank 0, which is in send('value'). Received: send",
        "of recv to be another rank of this job, 0 to 1. Received: ",
    ):
        assert printed.count(both) == 2
    alone = "[rank 1 of 2] Expected send to rank 0, which is in recv. Received: barrier. Call send"
    assert printed.count(alone) == 1


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "a rank ends its script while another waits for it in `recv`",
    "an error on every rank that waits; no hang",
    within=5,
)
def test_a_rank_leaves_while_another_receives(job, way):
    printed = job(3, "calls.py", "receive_from", "leaves", KERAS_DIST_REDUCE=way).failed()
    said = "Expected send to rank 0, which is in recv. Received: the end of the script."
    assert f"[rank 1 of 3] {said}" in printed


@pytest.mark.fault(
    "a rank dies while another waits for it in `recv`, also with `on_failure=continue`",
    "all ranks end, exit code not 0: no other rank has its data",
    within=10,
)
def test_a_rank_dies_while_another_receives(go_on):
    printed = go_on(3, "calls.py", "receive_from", "dies").failed()
    assert "[rank 0 of 3] Expected rank 1 to call recv. Received: it, or another" in printed
