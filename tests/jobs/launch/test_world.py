"""Ranks in processes that no MPI launcher has started."""

import itertools
import json
import socket
import subprocess
import sys
import threading

import pytest
from start_jobs import BARE, HANG_SECONDS, launcher, lean, wait_for

from keras_dist import __version__, errors
from keras_dist.launch.channel import Channel
from keras_dist.launch.interactive.outcome import is_consequence
from keras_dist.launch.world import WorldServer, join_world
from keras_dist.launch.world import world_server as server_module
from keras_dist.launch.world.pmi import MAX_KEYS, MAX_VALUE, ProcessManager, fields
from keras_dist.launch.world.world_server import End, Ends

pytestmark = pytest.mark.skipif(len(launcher()) > 1, reason="needs MPICH")

JOINED = """
import os, sys
import numpy as np
import keras_dist
address, token, rank, size = sys.argv[1:3] + [int(word) for word in sys.argv[3:]]
member = keras_dist.join_world(address, rank, size, token)
keras_dist.init()
total = keras_dist.allreduce(np.full(3, keras_dist.rank() + 1.0), op=keras_dist.Sum)
print(keras_dist.rank(), keras_dist.size(), keras_dist.local_size(), total.tolist(), flush=True)
"""


def start(server, text, ranks):
    """Starts processes that join the world of a server."""
    told = [server.address, server.token]
    return [
        subprocess.Popen(
            [sys.executable, "-c", BARE + JOINED + text, *told, str(rank), str(server.size)],
            env=lean(KERAS_BACKEND="torch"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]


def ends(processes):
    """Returns exit codes and outputs."""
    outputs = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def introduced(server, token=None, **about):
    """Returns a channel, and whether the server has accepted the introduction."""
    host, port = server.address.split(":")
    channel = Channel(socket.create_connection((host, int(port))))
    me = {"rank": 0, "size": server.size, "version": __version__, "host": "h", "node": "n"}
    known = channel.introduce(token or server.token, {**me, "purpose": "member", **about})
    return channel, known


def test_processes_become_ranks():
    with WorldServer(3) as server:
        codes, outputs = ends(start(server, "", range(3)))
        server.wait(HANG_SECONDS)
    assert codes == [0] * 3, outputs
    for rank, output in enumerate(outputs):
        assert f"{rank} 3 3 [6.0, 6.0, 6.0]" in output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("if rank == 1: raise ValueError('broken')\nkeras_dist.barrier()", "has aborted the job"),
        ("if rank == 1: os.kill(os.getpid(), 9)\nkeras_dist.barrier()", "has ended without"),
        (
            "if rank == 1: member.fail('no data'), os._exit(1)\nkeras_dist.barrier()",
            "has failed: no data",
        ),
    ],
    ids=["raises", "is killed", "fails"],
)
def test_a_lost_rank_ends_all(text, reason):
    with WorldServer(2) as server:
        codes, outputs = ends(start(server, text, range(2)))
        with pytest.raises(errors.RankError, match="rank 1 of 2.*" + reason):
            server.wait(HANG_SECONDS)
    assert 0 not in codes, outputs


def test_a_rank_that_never_comes_is_named():
    with WorldServer(2, timeout=6) as server:
        codes, [output] = ends(start(server, "", [0]))
        with pytest.raises(errors.RankError, match=r"rank 1 of 2.* to join within 6 s"):
            server.wait(HANG_SECONDS)
    assert codes == [1] and "rank 1 of 2" in output


def test_a_rank_that_leaves_before_mpi_has_started_ends_all():
    leaves = JOINED.partition("keras_dist.init()")[0]
    with WorldServer(2) as server:
        first = start(server, "", [0])
        told = [server.address, server.token, "1", "2"]
        subprocess.run([sys.executable, "-c", leaves, *told], env=lean(), timeout=HANG_SECONDS)
        codes, outputs = ends(first)
        with pytest.raises(errors.RankError, match=r"rank 1 of 2.*has left while others wait"):
            server.wait(HANG_SECONDS)
    assert codes != [0], outputs


def test_the_rank_that_has_died_is_named_though_the_one_that_waits_is_heard_first(monkeypatch):
    monkeypatch.setattr(server_module, "SETTLE_SECONDS", 4)  # on a busy machine
    with WorldServer(2) as server:
        members = [introduced(server, rank=rank)[0] for rank in range(2)]
        mpi, _ = introduced(server, rank=0, purpose="mpi")
        assert mpi.receive(HANG_SECONDS) == {"event": "joined"}
        members[0].send(event="failed", reason="RankLostError", is_consequence=True)
        assert wait_for(lambda: server._ends)
        mpi.send_line("cmd=abort exitcode=1")
        members[1].close()
        members[0].close()
        with pytest.raises(errors.RankError, match=r"rank 1 of 2.*has ended without leaving"):
            server.wait(HANG_SECONDS)
        assert server.failed_rank == 1


def test_the_word_of_a_rank_counts_more_than_its_abort(monkeypatch):
    monkeypatch.setattr(server_module, "SETTLE_SECONDS", HANG_SECONDS)  # the word ends the wait
    with WorldServer(3) as server:
        members = [introduced(server, rank=rank)[0] for rank in range(3)]
        mpi, _ = introduced(server, rank=1, purpose="mpi")
        mpi.send_line("cmd=abort exitcode=1")
        assert wait_for(lambda: server._ends)
        members[1].send(event="failed", reason="no data")
        with pytest.raises(errors.RankError, match=r"rank 1 of 3.*has failed: no data"):
            server.wait(HANG_SECONDS)


DIED = (1, End.DIED)


@pytest.mark.parametrize(
    ("heard", "cause"),
    [
        ([(0, End.WAITED), (0, End.ABORTED), (0, End.DIED), DIED], DIED),
        ([(0, End.ABORTED), (0, End.DIED), DIED], DIED),
        ([(0, End.WAITED), (1, End.FAILED), (1, End.ABORTED), (1, End.DIED)], (1, End.FAILED)),
        ([(0, End.WAITED), (1, End.ABORTED), (1, End.DIED)], (1, End.ABORTED)),
    ],
)
def test_the_cause_does_not_depend_on_the_order(heard, cause):
    for order in itertools.permutations(heard):
        ends = Ends()
        for rank, end in order:
            ends.add(rank, end, end.name)
        assert ends.cause() == (*cause, cause[1].name) and len(ends) == 2


@pytest.mark.parametrize("first", [End.FAILED, End.DIED])
def test_of_ranks_that_fail_or_die_the_first_counts(first):
    ends = Ends()
    for rank, end in ((2, first), (1, End.FAILED), (0, End.DIED)):
        ends.add(rank, end, "")
    assert ends.cause()[:2] == (2, first)


LOST = errors.RankLostError("rank 1 has died")


@pytest.mark.parametrize(
    ("error", "cause", "expected"),
    [
        (LOST, None, True),
        (RuntimeError("Graph execution error: keras_dist.errors.RankLostError: rank"), None, True),
        (OSError("cleanup"), LOST, True),
        (OSError("cleanup"), ValueError("no data"), False),
        (ValueError("RankLostError"), None, False),
    ],
)
def test_errors_that_follow_from_a_lost_rank(error, cause, expected):
    error.__context__ = cause  # as if it was raised while the other was handled
    assert is_consequence(error) == expected


def test_the_start_is_announced_once():
    with WorldServer(1) as server:
        member, _ = introduced(server)
        mpi, _ = introduced(server, purpose="mpi")
        assert mpi.receive(HANG_SECONDS) == {"event": "joined"}
        assert member.receive(HANG_SECONDS)["event"] == "start"
        server._start_if_complete()
        member.send(event="left")
        assert member.receive(HANG_SECONDS) is None
        server.wait(HANG_SECONDS)


def test_a_driver_that_ends_takes_the_ranks_along():
    server = WorldServer(2)
    processes = start(server, "import time; time.sleep(300)", range(2))
    for process in processes:
        assert "2 2 [3.0, 3.0, 3.0]" in process.stdout.readline()
    server.close()
    codes, outputs = ends(processes)
    assert codes == [1, 1], outputs
    assert all("was closed while ranks were running" in output for output in outputs)


def test_a_stranger_gets_a_challenge_and_nothing_else():
    with WorldServer(1) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(HANG_SECONDS)
            lines = stranger.makefile("rb")
            assert list(json.loads(lines.readline())) == ["challenge"]
            stranger.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            assert lines.read() == b""
        assert not introduced(server, token="wrong")[1]
        assert server.failure is None


def test_a_server_that_does_not_know_the_token_is_not_believed():
    ours, theirs = socket.socketpair()
    impostor = Channel(theirs)
    replies = threading.Thread(
        target=lambda: (
            impostor.send(challenge="0"),
            impostor.receive(),
            impostor.send(proof="0" * 64),
        )
    )
    replies.start()
    assert not Channel(ours).introduce("token", {})
    replies.join()


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"size": 3}, "size=2 as in WorldServer"),
        ({"rank": 2}, "a rank from 0 to 1"),
        ({"version": "0.1"}, "as in the driver"),
    ],
)
def test_a_rank_that_does_not_fit_is_told_why(about, reason):
    with WorldServer(2) as server:
        channel, known = introduced(server, **about)
        message = channel.receive(HANG_SECONDS)
        assert known and message["event"] == "end" and reason in message["reason"]


def test_each_rank_joins_once():
    with WorldServer(2) as server:
        first, _ = introduced(server)
        assert wait_for(lambda: server._members)  # or its threads take the second one first
        second, _ = introduced(server)
        assert "each rank once" in second.receive(HANG_SECONDS)["reason"]
        first.send(event="left")


def test_connections_are_bounded():
    with WorldServer(1) as server:
        host, port = server.address.split(":")
        opened = [socket.create_connection((host, int(port))) for _ in range(18)]
        for connection in opened:
            assert connection.makefile("rb").readline()
        with socket.create_connection((host, int(port))) as further:
            assert further.makefile("rb").readline() == b""
        for connection in opened:
            connection.close()


def test_keys_and_values_of_pmi_are_bounded():
    manager = ProcessManager(1)
    stored = "cmd=put_result rc=0 msg=success"
    assert manager.answer(fields("cmd=put kvsname=w key=a value=b c")) == stored
    assert manager.answer({"cmd": "get", "key": "a"}).endswith("value=b c")
    assert "key_not_found" in manager.answer({"cmd": "get", "key": "b"})
    too_long = {"cmd": "put", "key": "c", "value": "x" * (MAX_VALUE + 1)}
    assert "too_large" in manager.answer(too_long)
    for number in range(MAX_KEYS):
        manager.answer({"cmd": "put", "key": str(number), "value": ""})
    assert "too_large" in manager.answer({"cmd": "put", "key": "last", "value": ""})
    assert manager.answer({"cmd": "spawn"}) is None


def test_the_end_of_a_world_ends_its_barriers():
    manager = ProcessManager(2)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(manager.answer({"cmd": "barrier_in"})))
    waiting.start()
    manager.close()
    waiting.join(HANG_SECONDS)
    assert answers == [None]


def test_the_port_of_an_address_is_a_number():
    with pytest.raises(errors.ArgumentError, match="address as host:port"):
        join_world("127.0.0.1:port", 0, 1, "token")


def test_a_process_of_mpiexec_is_a_rank_already(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(errors.LaunchError, match="not a rank yet"):
        join_world("127.0.0.1:1", 0, 1, "token")


def test_a_server_needs_an_address_of_this_host():
    with pytest.raises(errors.ArgumentError, match="can listen at"):
        WorldServer(1, host="192.0.2.1")
