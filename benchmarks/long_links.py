"""Links with a delay, between test hosts.

Packets go through devices of this process, which holds each for a time before it hands it on: not
every kernel has a queue that delays (`netem`). A thread does so, and needs little time of a core,
since packets have nearly 64 KiB.
"""

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import threading
import time

from namespaces import INTERFACE

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
MTU = 65_000  # bytes
BACKLOG = 0.02  # seconds of sending; no more is taken from a host before
# A connection sends at most this before it is answered: enough for 1 Gbit/s and 0.5 s.
WINDOW = "4096 131072 67108864"


class LongLinks:
    """The network between test hosts, with a delay and a rate.

    Args:
        gbit: Gbit/s that each host sends at most.
        delay: seconds for a packet from host to host; an answer takes as long.
    """

    def __init__(self, gbit, delay):
        self.rate, self.delay = gbit * 1e9 / 8, delay
        self._devices = {}  # by address, as in a packet
        self._stop = threading.Event()

    def connect(self, host, bridge, port):
        """Gives a host a device of this network; the arguments are those of `namespaces`."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", port.encode(), IFF_TUN | IFF_NO_PI))
        move = f"ip link set {port} netns {host.holder.pid} name {INTERFACE}"
        subprocess.run(move.split(), check=True)
        host.run(*f"ip address add {host.address}/24 dev {INTERFACE}".split())
        host.run(*f"ip link set {INTERFACE} mtu {MTU} up".split())
        for kind in ("wmem", "rmem"):
            host.run("sysctl", "-q", "-w", f"net.ipv4.tcp_{kind}={WINDOW}")
        self._devices[socket.inet_aton(host.address)] = device

    @contextlib.contextmanager
    def carried(self):
        """Carries packets in a thread."""
        thread = threading.Thread(target=self._carry, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            for device in self._devices.values():
                os.close(device)

    def _carry(self):
        waiting = {device: collections.deque() for device in self._devices.values()}
        sent_at = dict.fromkeys(waiting, 0.0)  # when the last byte of a host is on its way
        while not self._stop.is_set():
            now = time.monotonic()
            for packets in waiting.values():
                while packets and packets[0][0] <= now:
                    _, packet = packets.popleft()
                    with contextlib.suppress(OSError):  # the host has gone
                        if (target := self._devices.get(packet[16:20])) is not None:
                            os.write(target, packet)
            due = [packets[0][0] for packets in waiting.values() if packets]
            due += [at - BACKLOG for at in sent_at.values() if at > now + BACKLOG]
            rest = max(0.0, min([*due, now + 0.1]) - time.monotonic())
            open_to_more = [each for each in waiting if sent_at[each] <= now + BACKLOG]
            for source in select.select(open_to_more, [], [], rest)[0]:
                with contextlib.suppress(OSError):
                    packet = os.read(source, MTU + 500)
                    begin = max(time.monotonic(), sent_at[source])
                    sent_at[source] = begin + len(packet) / self.rate
                    waiting[source].append((sent_at[source] + self.delay, packet))
