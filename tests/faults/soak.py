"""A long job with a fault every 30 s: no step is lost, no bit differs, and nothing is left.

    python tests/faults/soak.py --minutes 120                  4 ranks on two hosts, on torch
    .venv-openmpi/bin/python tests/faults/soak.py --minutes 3 --every 10 --seed 5

`keras-dist run --max-restarts` trains on two hosts, network namespaces of this machine (needs
root). They have a /dev/shm each, and the job a temporary folder of its own, so that all that is
left is seen. Each step is saved, in memory and on disk: a restart reads the memory, also if the
second host has lost its own; a preempted job, which is started again with the same id as by a
batch system, reads the newer of both.

Afterwards the same job runs without faults, backups and pauses: each step must have had its bits.
The exit status is 1 if a step was lost or differs, if training did not go on, or if something grew
during the job or was left.
"""

import argparse
import collections
import contextlib
import datetime
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from namespaces import INTERFACE, make_hosts
from start_jobs import lean, wait_for
from test_lost_hosts import QUEUE, launcher_command

from keras_dist.runtime.exit_hooks import PREEMPTED_EXIT_CODE

RANKS, HOSTS = 4, "host1:2,host2:2"
TRAINING = Path(__file__).parent / "scripts" / "soak_training.py"
PAUSE = 50  # milliseconds after each step, so that the cores are not always busy
LIMIT_SECONDS = 180  # from a fault until training goes on
STALL_SECONDS, ABORT_SECONDS = 3, 12
BAD_SECONDS = 3  # of a short fault, below the stall limit
STEPS = 100  # in an epoch
RANK = re.compile(rb"\0(PMI_RANK|OMPI_COMM_WORLD_RANK)=")  # of MPICH and of Open MPI


class Wrong(Exception):
    """What did not go as documented."""


def main(arguments=None):
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="until the last fault")
    parser.add_argument("--every", type=float, default=30, help="seconds from fault to fault")
    parser.add_argument("--backend", choices=["torch", "tensorflow", "jax"], default="torch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with make_hosts(2) as (hosts, reach):
        soak = Soak(folder, hosts, reach, options)
        try:
            soak.run()
            soak.compare()
        except Wrong as error:
            soak.wrong.append(str(error))
        except KeyboardInterrupt:
            soak.wrong.append("interrupted")
    print(soak.report())
    if soak.wrong:
        print("\nWRONG:", *soak.wrong, f"The files are in {folder}.", sep="\n", flush=True)
    else:
        shutil.rmtree(folder)
    return int(bool(soak.wrong))


class Soak:
    """One job, the faults that strike it, and what was seen."""

    def __init__(self, folder, hosts, reach, options):
        self.folder, self.hosts, self.options = folder, hosts, options
        launched = launcher_command(Path(sys.executable), hosts, reach, folder / "bin")
        self.command, self.settings = launched
        self.command[-1] = HOSTS
        (folder / "temporary").mkdir()
        self.chance = random.Random(options.seed)
        self.job, self.launches, self.lost, self.equal = None, 0, 0, "not compared"
        self.minutes, self.ended = 0, False
        self.seen, self.samples, self.wrong = collections.defaultdict(list), [], []

    def run(self):
        """Trains until the time is up, with faults, then to the end of an epoch."""
        self.samples.append(self.sample())
        self.launch()
        self.goes_on(dict.fromkeys(range(RANKS), 20))
        self.began = struck = time.monotonic()
        kinds = []
        enough = self.folder / "enough"
        print(
            f"`touch {enough}` ends it early. Lines end with",
            *self.samples[0],
            sep="; ",
            flush=True,
        )
        while time.monotonic() - self.began < 60 * self.options.minutes and not enough.exists():
            before, restarts = self.steps(), self.restarts()
            rest = max(self.options.every - (time.monotonic() - struck), self.options.every / 3)
            if wait_for(lambda: self.job.poll() is not None, rest):
                raise Wrong(f"the job has ended without a fault, exit code {self.job.poll()}")
            if not all(self.steps()[rank] > before[rank] for rank in range(RANKS)):
                raise Wrong(f"no steps in {rest:.0f} s without a fault")
            if self.restarts() != restarts:
                self.wrong.append(f"a restart without a fault behind step {before[0]}")
            self.samples.append(self.sample())
            # Not later: it ends the launcher, which is to be seen over many restarts.
            drawn = sorted(FAULTS.keys() - ({PREEMPTION} if self.launches > 2 else set()))
            kinds = kinds or self.chance.sample(drawn, len(drawn))
            struck = time.monotonic()
            self.strike(kinds.pop())
        enough.touch()
        if not wait_for(lambda: self.job.poll() is not None, LIMIT_SECONDS):
            raise Wrong("training does not end")
        if self.job.returncode != 0:
            raise Wrong(f"training ends with exit code {self.job.returncode}")
        wait_for(lambda: not any(host.processes() for host in self.hosts), 20)
        self.samples.append(self.sample())
        self.ended = True

    def launch(self):
        """Starts the job, or starts it again."""
        self.launches += 1
        words = ["--max-restarts", "100000", "--stall-seconds", str(STALL_SECONDS)]
        words += ["--stall-abort-seconds", str(ABORT_SECONDS)]
        self.job = self.start(words, self.folder, 10**9, STEPS, PAUSE, "backup")

    def start(self, options, *arguments):
        variables = {
            "KERAS_BACKEND": self.options.backend,
            "KERAS_DIST_JOB_ID": self.folder.name,
            "FAULT_FOLDER": str(self.folder / "temporary"),
            "TMPDIR": str(self.folder / "temporary"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
        }
        program = [*options, sys.executable, TRAINING, *arguments]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [str(word) for word in [*self.hosts[0].enter, *self.command, *program]],
                env=lean(**variables, **self.settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def strike(self, kind):
        """Causes a fault and waits until a step that began after it has ended on all ranks."""
        rank = self.chance.randrange(RANKS)
        restarts = self.restarts()
        highest, begin = max(self.steps().values()), time.monotonic()
        FAULTS[kind](self, rank)
        self.goes_on(dict.fromkeys(range(RANKS), highest + 2), kind)
        seconds, restarts = time.monotonic() - begin, self.restarts() - restarts
        self.seen[kind].append((seconds, restarts))
        self.minutes = round((time.monotonic() - self.began) / 60)
        what = f"step {highest}: {kind}, rank {rank}: {seconds:.1f} s, {restarts} restarts"
        print(f"{datetime.datetime.now():%H:%M:%S} {what}", *self.samples[-1].values(), flush=True)

    def goes_on(self, steps, kind="start"):
        """Waits until each rank has taken some step; a preempted job is started again."""
        end = time.monotonic() + LIMIT_SECONDS
        while not all(self.steps()[rank] >= step for rank, step in steps.items()):
            code = self.job.poll()
            if code == PREEMPTED_EXIT_CODE:
                self.launch()
            elif code is not None:
                raise Wrong(f"{kind}: the job has ended, exit code {code}")
            if time.monotonic() > end:
                raise Wrong(f"{kind}: training does not go on within {LIMIT_SECONDS} s")
            time.sleep(0.05)

    def steps(self):
        """Returns the last step of each rank."""
        found = dict.fromkeys(range(RANKS), 0)
        for rank in found:
            notes = self.folder / f"steps-{rank}"
            if notes.exists() and (size := notes.stat().st_size):
                with notes.open("rb") as file:
                    file.seek(max(0, size - 100))
                    found[rank] = int(file.read().split()[-2])
        return found

    def restarts(self):
        return (self.folder / "output").read_text(errors="replace").count(". Restart ")

    def pid(self, rank):
        return int((self.folder / f"rank-{rank}").read_text())

    def sample(self):
        """Returns what the job uses now."""
        listing = "find /dev/shm -type f -printf %s\\n".split()
        sizes = [int(size) for host in self.hosts for size in host.run(*listing).split()]
        launcher = [self.job.pid] if self.job and self.job.poll() is None else []
        ranks = [self.pid(rank) for rank in range(RANKS)] if launcher else []
        temporary = (self.folder / "temporary").iterdir()
        return {
            "processes": sum(len(host.processes()) for host in self.hosts),
            "launcher, MiB": _resident(launcher),
            "launcher, open files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in launcher),
            "ranks, MiB": _resident(ranks),
            "/dev/shm, files": len(sizes),
            "/dev/shm, MiB": round(sum(sizes) / 2**20, 1),
            "temporary folder, entries": sum("pid-" not in path.name for path in temporary),
        }

    def compare(self):
        """Compares the steps of the ranks with those of the same job without a fault."""
        found = [self.read(self.folder, rank) for rank in range(RANKS)]
        plain = self.folder / "plain"
        plain.mkdir()
        epochs = max(found[0]) // STEPS
        if self.start([], plain, epochs, STEPS, 0).wait():
            raise Wrong("the job without faults failed")
        wanted = self.read(plain, 0)
        # A rank that is killed between its backup and its note has none of that step.
        without = max(sum(at not in bits for at in wanted) for bits in found)
        if without > self.restarts() + self.launches:
            self.wrong.append(f"a rank has no note of {without} steps")
        pairs = [[(bits.get(at, text), text) for bits in found] for at, text in wanted.items()]
        same = sum(all(mine == text for mine, text in pair) for pair in pairs)
        self.equal = f"{same} of {len(wanted)}"
        if same < len(wanted) or self.lost:
            self.wrong.append(f"{self.equal} steps are equal, {self.lost} were lost")

    def read(self, folder, rank):
        """Returns the digests by step that a rank noted, and counts steps that were lost."""
        found, last, lost = {}, 0, 0
        for line in (folder / f"steps-{rank}").read_text().splitlines():
            step, digest = int(line.split()[0]), line.split()[1]
            # The step in flight is repeated. The root may not have saved the last one yet.
            lost += max(0, last - step)
            if found.setdefault(step, digest) != digest:
                self.wrong.append(f"rank {rank} has other bits when it repeats step {step}")
            last = step
        self.lost = max(self.lost, lost)
        return found

    def report(self):
        """Returns the tables, and adds what has grown or was left to what is wrong."""
        first, *running = self.samples
        if self.ended:
            *running, last = running
            left = {name: value for name, value in last.items() if value > first[name]}
            self.wrong += [f"left: {value} {name}" for name, value in left.items()]
        quarter = -(-len(running) // 4)
        rows = []
        for name in first:
            values = [each[name] for each in running] or [0]
            begin, end = map(statistics.median, (values[:quarter], values[-quarter:]))
            if end > 1.25 * begin + 2:
                self.wrong.append(f"grown: {name} from {begin:g} to {end:g}")
            rows.append([name, first[name], begin, end, max(values), self.samples[-1][name]])
        git = ["git", "-C", Path(__file__).parent, "rev-parse", "--short=10", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        total = [commit, datetime.date.today(), self.minutes, max(self.steps().values())]
        total += [sum(map(len, self.seen.values())), self.restarts(), self.launches - 1]
        head = "commit | date | minutes | steps | faults | restarts | started again | lost | equal"
        kinds = []
        for kind, seen in sorted(self.seen.items()):
            seconds, restarts = zip(*seen, strict=True)
            late = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
            kinds.append([kind, len(seen), sum(restarts), *late])
        tables = [
            _table(head, [[*total, self.lost, self.equal]]),
            _table("fault | times | restarts | median, s | largest, s", kinds),
            _table("used | before | first quarter | last quarter | most | after", rows),
        ]
        return "\n\n".join(tables)


def _resident(pids):
    """Returns the resident memory of processes in MiB."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def _table(head, rows):
    width = head.count("|") + 1
    lines = [head, " | ".join(["---"] * width), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _send(name, seconds=None):
    """A fault that sends a signal to a rank, and SIGCONT after some seconds."""

    def strike(soak, rank):
        pid = soak.pid(rank)
        os.kill(pid, getattr(signal, name))
        if seconds:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    return strike


def _kill_twice(soak, rank):
    """Kills a rank, and some seconds later a process that mpiexec has started in the meantime."""
    os.kill(soak.pid(rank), signal.SIGKILL)
    time.sleep(soak.chance.uniform(0.5, 4))
    pids = []
    for pid in [pid for host in soak.hosts for pid in host.processes()]:
        with contextlib.suppress(OSError):
            if RANK.search(Path(f"/proc/{pid}/environ").read_bytes()):
                pids.append(pid)
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(soak.chance.choice(pids), signal.SIGKILL)


def _raise(soak, rank):
    (soak.folder / f"raise-{rank}").touch()


def _part(loses=False):
    """A fault that cuts off the second host for a while, or loses it with its memory."""

    def strike(soak, rank):
        second = soak.hosts[1]
        second.link("down")
        if loses:
            second.kill_all()
            # The daemon of Open MPI has a folder; the hosts have one temporary folder here.
            left = soak.folder / "temporary" / "prted.*"
            second.run("sh", "-c", f"rm -rf /dev/shm/* {left}")
        time.sleep(BAD_SECONDS)
        second.link("up")

    return strike


def _shape(queue):
    """A fault that limits what the second host sends, for three times as long."""

    def strike(soak, rank):
        soak.hosts[1].run(*f"{QUEUE} {queue}".split())
        time.sleep(3 * BAD_SECONDS)
        soak.hosts[1].run(*f"tc qdisc delete dev {INTERFACE} root".split())

    return strike


PREEMPTION = "SIGTERM on a rank: the job saves and ends, and is started again"
FAULTS = {
    "a rank is killed": _send("SIGKILL"),
    "a rank is killed, and another during the restart": _kill_twice,
    "a rank is stopped; the stall limit acts": _send("SIGSTOP"),
    f"a rank is stopped for {BAD_SECONDS} s": _send("SIGSTOP", BAD_SECONDS),
    "a rank raises an exception": _raise,
    PREEMPTION: _send("SIGTERM"),
    "the second host is lost with its memory": _part(loses=True),
    f"the link of a host is down for {BAD_SECONDS} s": _part(),
    "packets are lost": _shape("rate 400mbit burst 8k limit 16k"),
    "the link of a host is slow: 10 Mbit/s": _shape("rate 10mbit burst 32k latency 400ms"),
}


if __name__ == "__main__":
    sys.exit(main())
