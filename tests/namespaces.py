"""Test hosts: network namespaces of this machine, connected by a bridge.

    scripts/hosts 3                       a shell on the first of three hosts
    scripts/hosts 2 keras-dist --version  a command there

Each host has a name (host1, host2, ...), an address, a file /etc/hosts with all names, and its own
/dev/shm. The hosts share file systems and processes. `$TEST_HOSTS` has the names, and
`$TEST_HOSTS_REACH` is a program that takes the place of ssh.

A host lives as long as the process that holds its namespaces. With the pipe to this process it
kills the processes on its host and ends: nothing is left after a kill.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
NETWORK = "10.213.77."
# Waits for the end of a pipe, without another process, then kills the others on this host.
HOLD = """echo ready
while read -r line; do :; done
mine=$(readlink /proc/$$/ns/net)
for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    [ $pid = $$ ] || [ "$(readlink $folder/ns/net)" != "$mine" ] || kill -KILL $pid
done 2> /dev/null
"""
INTERFACE = "eth0"
READY_SECONDS = 100
TOLD = "TEST_HOSTS_TOLD"  # variable with which a connection ends as soon as its host is lost
# MPICH's transports use the network interface only; without this UCX and libfabric search others.
MPICH = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE, "FI_TCP_IFACE": INTERFACE}


class Unavailable(Exception):
    """Hosts cannot be made on this machine; the text names the reason."""


class Host:
    """A test host.

    Args:
        name: its name.
        address: its address; empty for the bridge.
        holder: the process that holds its namespaces.
    """

    def __init__(self, name, address, holder):
        self.name, self.address, self.holder = name, address, holder
        flags = ["--net", "--mount", "--uts"]
        self.enter = ["nsenter", "--target", str(holder.pid), *flags, f"--wd={os.getcwd()}"]

    def run(self, *command):
        """Runs a command on the host; returns its output."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"{shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def link(self, state):
        """Sets the link of the host "up" or "down"."""
        self.run("ip", "link", "set", INTERFACE, state)

    def limit(self, gbit):
        """Limits what the host sends to a number of Gbit/s."""
        # The bucket holds what is sent in 0.1 ms, and at least two segments of 64 KiB.
        burst = max(128 * 1024, int(gbit * 1e9 / 8 * 1e-4))
        shape = f"tbf rate {gbit * 1000:.0f}mbit burst {burst} latency 20ms"
        self.run(*f"tc qdisc replace dev {INTERFACE} root {shape}".split())

    def processes(self):
        """Returns the processes on the host, except the one that holds it."""
        mine = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(folder / "ns" / "net").st_ino == mine:
                    found.append(int(folder.name))
        return [pid for pid in found if pid != self.holder.pid]

    def lose(self):
        """Loses the host: its link is down, and its processes are killed."""
        self.link("down")
        self.kill_all()

    def kill_all(self):
        """Kills the processes on the host."""
        self.signal(signal.SIGKILL)

    def signal(self, number):
        """Sends a signal to the processes on the host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def make_hosts(count, connect=None):
    """Makes hosts, and removes them and their processes at the end.

    Args:
        count: how many.
        connect: gives a host its interface. Defaults to `None`: a port of a bridge.

    Yields:
        The hosts, and the program that takes the place of ssh.

    Raises:
        Unavailable: a tool or a permission is missing.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} missing (packages iproute2, util-linux)")
    if os.geteuid() != 0:
        raise Unavailable("only root may make network namespaces")
    with contextlib.ExitStack() as stack:
        removed = tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(removed))
        known = [(f"host{number}", f"{NETWORK}{number}") for number in range(1, count + 1)]
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in known))
        bridge = stack.enter_context(_held("bridge", "", names, f"rm -rf {folder}"))
        bridge.run(*"ip link add bridge type bridge".split())
        bridge.run(*"ip link set bridge up".split())
        hosts = [stack.enter_context(_held(name, address, names)) for name, address in known]
        for number, host in enumerate(hosts):
            (connect or _connect)(host, bridge, f"port{number}")
        for host in hosts:
            _wait_for_link(host)
        yield hosts, _write_reach(folder / "reach", hosts)


@contextlib.contextmanager
def hosts_or_skip(count):
    """`make_hosts` in a test, which is skipped where hosts cannot be made."""
    import pytest

    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(make_hosts(count))
        except Unavailable as error:
            pytest.skip(f"NOT TESTED: several hosts: {error}")
        yield made


@contextlib.contextmanager
def _held(name, address, names, at_the_end=""):
    """A host without a connection, and a shell command for its end."""
    # UCX finds devices in /sys, which shows the namespace in which it was mounted.
    script = (
        f"hostname {name} && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && "
        f"mount --bind {shlex.quote(str(names))} /etc/hosts && ip link set lo up || exit\n"
        f"{HOLD}{at_the_end}"
    )
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as holder:
        host = Host(name, address, holder)
        try:
            answer = holder.stdout.readline().strip()
            if answer != "ready":
                raise Unavailable(f"namespaces cannot be made here: {answer}")
            yield host
        finally:
            host.kill_all()
            holder.stdin.close()


def _connect(host, bridge, port):
    ends = f"{INTERFACE} netns {host.holder.pid}", f"{port} netns {bridge.holder.pid}"
    host.run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
    bridge.run(*f"ip link set {port} master bridge up".split())
    host.run(*f"ip address add {host.address}/24 dev {INTERFACE}".split())
    host.link("up")


def _wait_for_link(host):
    """Waits until the kernel reports the link as up."""
    end = time.monotonic() + READY_SECONDS
    state = f"/sys/class/net/{INTERFACE}/operstate"
    while host.run("cat", state).strip() not in ("up", "unknown"):  # not all devices report it
        if time.monotonic() > end:
            raise Unavailable(f"the link of {host.name} does not come up")
        time.sleep(0.05)


def _write_reach(path, hosts):
    """Writes the program that takes the place of ssh: options, a host, and a shell command."""
    cases = "".join(
        f'{host.name}|{host.address}) {shlex.join(host.enter)} sh -c "$*" ;;\n' for host in hosts
    )
    path.write_text(
        "#!/bin/sh\n"
        # Options with a value, such as -l USER or -p PORT, and without.
        'while :; do case "$1" in\n'
        '-o) case "$2" in ServerAliveInterval=*) alive=$((5 * ${2#*=})) ;; esac; shift 2 ;;\n'
        "-[lpi]) shift 2 ;; -*) shift ;; *) break\nesac; done\n"
        f'host=$1; shift\ncase "$host" in\n{cases}'
        '*) echo "no test host $host" >&2; exit 255\nesac\n'
        # ssh notices that a host is lost if it asks whether the host is alive, or is told by TCP.
        "code=$?; [ $code -eq 137 ] || exit $code\n"
        f'[ -z "${TOLD}" ] || exit 255\n'
        '[ "$alive" ] || exec setpriv --pdeathsig KILL sleep 600\n'
        "sleep $alive; exit 255\n"
    )
    path.chmod(0o755)
    return path


def mpiexec_command(python, hosts, reach, ranks_per_host):
    """Returns the mpiexec command of the MPI library of a Python, and its environment."""
    folder = Path(python).parent
    mpiexec = folder / "mpiexec"
    number = ranks_per_host * len(hosts)
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "HYDRA" in version:
        names = ",".join(host.name for host in hosts)
        launch = ["-launcher", "ssh", "-launcher-exec", reach, "-iface", INTERFACE]
        return [mpiexec, *launch, "-hosts", names, "-ppn", ranks_per_host, "-n", number], MPICH
    names = ",".join(f"{host.name}:{ranks_per_host}" for host in hosts)
    agent = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", reach]
    network = ["--prtemca", "prte_if_include", INTERFACE, "--mca", "btl_tcp_if_include", INTERFACE]
    network += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm"]
    path = f"{folder}:{os.environ['PATH']}"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-x", "PATH"]
    command = [mpiexec, *options, *agent, *network, "--host", names, "-np", number]
    return command, {"PATH": path}


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("count", type=int, help="number of hosts")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command on the first host")
    options = parser.parse_args()
    if not 1 <= options.count <= 200:
        parser.error("the number of hosts is 1 to 200")
    try:
        with make_hosts(options.count) as (hosts, reach):
            environment = {
                **os.environ,
                "TEST_HOSTS": ",".join(host.name for host in hosts),
                "TEST_HOSTS_REACH": str(reach),
            }
            command = options.command or [os.environ.get("SHELL", "sh")]
            return subprocess.run([*hosts[0].enter, *command], env=environment).returncode
    except Unavailable as error:
        print(f"scripts/hosts: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
