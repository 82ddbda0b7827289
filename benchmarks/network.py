"""Simulates messages between nodes with SimGrid; started by scale.py, one process a simulation.

Debian's python3-simgrid belongs to /usr/bin/python3, so this file needs nothing else. It reads a
task from its standard input, and prints the seconds until the last message has arrived.
"""

import json
import sys

from simgrid import (
    Actor,
    ClusterCallbacks,
    Comm,
    Engine,
    FatTreeParams,
    Link,
    LinkInRoute,
    NetZone,
    this_actor,
)

LINK_LATENCY = 0  # else flows over fewer links would get more bandwidth; messages have a time


def star(nodes, bandwidth):
    """Returns the hosts of a network in which only the links of the nodes limit the speed."""
    zone = NetZone.create_star_zone("star")
    hosts = []
    for node in range(nodes):
        host = zone.create_host(f"node{node}", 1e9)
        link = zone.create_split_duplex_link(f"link{node}", bandwidth)
        link.set_latency(LINK_LATENCY).seal()
        up = [LinkInRoute(link, LinkInRoute.Direction.UP)]
        zone.add_route(host.netpoint, None, None, None, up, True)
        hosts.append(host)
    zone.seal()
    return hosts


def fat_tree(nodes, bandwidth, leaf):
    """Returns the hosts of a 2:1 fat tree: the nodes of a switch share half as many links up."""
    hosts = []

    def make(zone, position, number):
        hosts.append(zone.create_host(f"node{number}", 1e9))
        return hosts[-1].netpoint, None

    switches = -(-nodes // leaf)
    zone = NetZone.create_fatTree_zone(
        "tree",
        None,
        FatTreeParams(2, [leaf, switches], [1, leaf // 2], [1, 1]),
        ClusterCallbacks(make, None, None),
        bandwidth,
        LINK_LATENCY,
        Link.SharingPolicy.SPLITDUPLEX,
    )
    zone.seal()
    return hosts[:nodes]


def send(hosts, task):
    """Sends the messages of all phases; each phase begins when the one before has ended."""
    for phase in task["phases"]:
        this_actor.sleep_for(task["latency"])
        under_way = []
        for number, messages in enumerate(phase):
            if number:
                this_actor.sleep_for(task["message"])
            under_way += [
                Comm.sendto_async(hosts[sender], hosts[receiver], nbytes)
                for sender, receiver, nbytes in messages
            ]
        Comm.wait_all(under_way)


def run():
    task = json.load(sys.stdin)
    # Bandwidth is shared without the model of TCP, and acknowledgements cost nothing.
    options = ["--cfg=network/model:CM02", "--cfg=network/crosstraffic:0"]
    engine = Engine(["network", *options, "--log=root.thres:error"])
    nodes, bandwidth, leaf = task["nodes"], 1 / task["byte"], task["leaf"]
    hosts = fat_tree(nodes, bandwidth, leaf) if leaf else star(nodes, bandwidth)
    Actor.create("all nodes", hosts[0], lambda: send(hosts, task))
    engine.run()
    print(engine.clock)


if __name__ == "__main__":
    run()
