"""What others on the network or on the host see of the processes that start and restart ranks."""

import argparse
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from keras_dist.launch.channel import Channel, connected
from keras_dist.launch.cli import command, standby
from keras_dist.launch.interactive.outcome import JobFiles, as_value
from keras_dist.launch.world import WorldServer

TOKEN = "a token that nobody guesses"


def test_the_token_itself_is_never_sent(monkeypatch):
    sent, send_line = [], Channel.send_line
    monkeypatch.setattr(
        Channel, "send_line", lambda self, line: (sent.append(line), send_line(self, line))
    )
    server, client = map(Channel, socket.socketpair())
    accepted = threading.Thread(target=server.accept, args=(TOKEN,))
    accepted.start()
    assert client.introduce(TOKEN, {"rank": 0})
    accepted.join()
    assert len(sent) == 3 and not any(TOKEN in line for line in sent)


def test_another_token_is_no_proof():
    server, client = map(Channel, socket.socketpair())
    found = []
    accepted = threading.Thread(target=lambda: found.append(server.accept(TOKEN)))
    accepted.start()
    client.receive()
    client.send(challenge="", me={}, proof="0" * 64)
    accepted.join()
    assert found == [None]


@pytest.mark.parametrize("line", ["cos\nsystem\n", "[1, 2]", "{"])
def test_a_message_is_a_json_object(line):
    ours, theirs = map(Channel, socket.socketpair())
    theirs.send_line(line)
    assert ours.receive() is None


def test_on_one_host_processes_stand_by_at_a_socket_of_the_user():
    environment = {}
    with standby.standing_by(environment, None, 1, 1):
        token, *addresses = environment["KERAS_DIST_STANDBY_SERVER"].split("@")
        [path] = map(Path, addresses)
        assert len(token) > 40
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def test_with_several_hosts_a_stranger_at_the_port_is_sent_away():
    environment = {}
    with standby.standing_by(environment, ["localhost"], 1, 1):
        _, *addresses = environment["KERAS_DIST_STANDBY_SERVER"].split("@")
        channel = Channel(connected(addresses[0], 20))
        assert not channel.introduce("another token", {"rank": 0, "size": 1, "restart": 1})
        assert channel.receive(20) is None


def test_values_of_variables_are_on_no_command_line():
    variables = {"KERAS_DIST_STANDBY_SERVER": TOKEN, "PASSWORD": "hidden"}
    names = command._passed(argparse.Namespace(env=["PASSWORD=hidden"]), variables, True)
    assert names == ["KERAS_DIST_STANDBY_SERVER", "PASSWORD"]


def test_a_server_of_ranks_listens_on_the_loopback_interface_unless_it_is_told():
    with WorldServer(1) as server:
        assert server.address.startswith("127.0.0.1:")
        assert len(server.token) > 40
    with WorldServer(1, host="127.0.0.2") as server:
        channel = Channel(connected(server.address, 20))
        assert channel.introduce(server.token, {}) and server.address.startswith("127.0.0.2:")


def test_what_ranks_unpickle_is_the_users_alone(tmp_path):
    files, before = JobFiles(tmp_path), os.umask(0)
    try:
        files.put_call(())
        files.put_outcome(1, as_value(2.0, 1))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"call": 0o600, "value-1": 0o600}
