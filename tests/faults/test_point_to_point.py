"""Point-to-point messages between two ranks, one of which makes another call or dies."""

import pytest

CALLS = """
import signal
import numpy as np
from keras_dist import ops, errors
from keras_dist.ops.point_to_point import recv, send
runtime.init()
me, other = runtime.rank(), 1 - runtime.rank()
x = np.arange(6.0).reshape(2, 3)
def tried(call):
    try:
        call()
    except errors.KerasDistError as error:
        print(f"{me}: {error}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "a rank sends a message that the other does not expect, or both send",
    "an error on both that names what differs; the job continues",
    within=20,
)
def test_a_rank_receives_something_else(job, way):
    text = """
fault()
assert (recv(0) if me else send(x, 1)) is None or me == 1
tried(lambda: recv(0, like=x.T) if me else send(x, 1))
tried(lambda: recv(0, like=x.astype("f4")) if me else send(x, 1))
tried(lambda: recv(0, like=x, name="b") if me else send(x, 1, name="a"))
tried(lambda: send(x, other))
tried(lambda: recv(me))
if me == 0:
    tried(lambda: recv(1))
ops.barrier()
if me == 0:
    send(x, 1)
else:
    assert (recv(0, like=x) == x).all()
"""
    ended = job(2, CALLS + text, bare=True, KERAS_DIST_REDUCE=way)
    assert ended.returncode == 0, ended.stdout
    for both in (
        "[rank 1 of 2] Expected 'value' with shape (2, 3) as on rank 0. Received: (3, 2). Give",
        "[rank 1 of 2] Expected 'value' with dtype float64 as on rank 0. Received: float32. Give",
        "[rank 1 of 2] Expected name='a' in send('a') as on rank 0. Received: name='b'. Give both",
        "[rank 1 of 2] Expected recv from rank 0, which is in send('value'). Received: send",
        "of recv to be another rank of this job, 0 to 1. Received: ",
    ):
        assert ended.stdout.count(both) == 2, ended.stdout
    alone = "[rank 1 of 2] Expected send to rank 0, which is in recv. Received: barrier. Call send"
    assert ended.stdout.count(alone) == 1


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "a rank ends its script while another waits for it in `recv`",
    "an error on every rank that waits; no hang",
    within=5,
)
def test_a_rank_leaves_while_another_receives(job, way):
    text = """
if me == 2:
    ops.barrier()
elif me == 1:
    fault()
else:
    recv(1)
"""
    ended = job(3, CALLS + text, bare=True, KERAS_DIST_REDUCE=way)
    assert ended.returncode != 0
    said = "Expected send to rank 0, which is in recv. Received: the end of the script."
    assert f"[rank 1 of 3] {said}" in ended.stdout


@pytest.mark.fault(
    "a rank dies while another waits for it in `recv`, also with `on_failure=continue`",
    "all ranks end, exit code not 0: no other rank has its data",
    within=10,
)
def test_a_rank_dies_while_another_receives(job, open_mpi):
    text = """
if me == 1:
    fault()
    os.kill(os.getpid(), signal.SIGKILL)
recv(1) if me == 0 else ops.barrier()
"""
    options = ("--with-ft", "ulfm")
    ended = job(
        3,
        CALLS + text,
        bare=True,
        python=open_mpi,
        options=options,
        KERAS_DIST_ON_FAILURE="continue",
    )
    assert ended.returncode != 0
    assert "[rank 0 of 3] Expected rank 1 to call recv. Received: it, or another" in ended.stdout
