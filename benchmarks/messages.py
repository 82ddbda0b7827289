"""Counts the messages of the root outside of collectives: initialization, stall watchdog, monitor.

    python benchmarks/messages.py [--ranks 3 8 24]

More ranks than cores are fine: messages are counted, and nothing is timed. "All to the root" is
what the root would exchange if every rank sent it an alarm, and it asked every rank.
"""

import collections
import json
import time
from pathlib import Path

from common import answer, conclude, options_of, parser, start, table

RANKS = [3, 8, 24]
PERIOD_SECONDS, AWAY_SECONDS = 4, 6  # one report, and no second one
REPORT_SECONDS = 20  # for the report of the monitor
COLLECTIVES = ["Allgather", "Allreduce", "Barrier", "Bcast", "Dup", "Split", "Split_type"]
COLLECTIVES += ["allgather", "allreduce", "bcast"]
FAULTS = {"rank 1 is missing": 1, "the root is missing": 0}
TOP, STALL = "keras-dist top", "a stall"
TITLES = {
    "init": "collectives of MPI in `keras_dist.init`",
    **{name: f"{STALL}, {name}" for name in FAULTS},
    TOP: f"a line of `{TOP}`",
}


def main():
    made = parser(__doc__, quick="3 and 8 ranks")
    made.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks")
    options = options_of(made, work)
    numbers = options.ranks or RANKS[: 2 if options.quick else None]
    report(count_messages(numbers), options.output)


def count_messages(numbers):
    """Returns what jobs of some numbers of ranks counted: by number, and by what happened."""
    settings = {"KERAS_DIST_STALL_SECONDS": str(PERIOD_SECONDS), "OMP_NUM_THREADS": "1"}
    settings["KERAS_DIST_STALL_ABORT_SECONDS"] = "0"
    return {ranks: start(__file__, ranks, {}, **settings) for ranks in numbers}


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    from mpi4py import MPI

    from keras_dist import _backends, _engine
    from keras_dist.monitor.collector import Collector
    from keras_dist.runtime.startup import connect_ranks

    json.loads(Path(path).read_text())
    _backends.in_use = list  # no framework
    messages, calls = count_mailbox(_engine.Mailbox), collections.Counter()
    comm = connect_ranks(counted(MPI, calls)(MPI.COMM_WORLD))
    found = {"init": sum(calls.values())}
    for name, missing in FAULTS.items():
        found[name] = count_around(comm, messages, lambda r=missing: stay_away(comm, r))
    collector = Collector(comm)
    found[TOP] = count_around(comm, messages, lambda: read(comm, collector))
    collector.close()
    comm.free()
    if comm.rank == 0:
        answer(path, found)


def count_mailbox(Mailbox):
    """Counts the messages that this rank sends and receives in mailboxes."""
    messages, post, receive = collections.Counter(), Mailbox.post, Mailbox.receive

    def counting_post(self, rank, message):
        messages["sent"] += 1
        post(self, rank, message)

    def counting_receive(self):
        found = receive(self)
        messages["received"] += len(found)
        return found

    Mailbox.post, Mailbox.receive = counting_post, counting_receive
    return messages


def counted(MPI, calls):
    """Returns a class of communicators that count collective calls."""

    def counting(name):
        def call(self, *arguments, **options):
            calls[name] += 1
            return getattr(MPI.Intracomm, name)(self, *arguments, **options)

        return call

    return type("Counted", (MPI.Intracomm,), {name: counting(name) for name in COLLECTIVES})


def count_around(comm, messages, act):
    """Returns the messages of the root, and the most of another rank, while `act` runs."""
    comm.world.Barrier()
    before = messages.total()
    act()
    counts = comm.world.gather(messages.total() - before)
    return [counts[0], max(counts[1:])] if comm.rank == 0 else None


def stay_away(comm, missing):
    """Makes one rank come to a barrier late."""
    from keras_dist import _engine

    if comm.rank == missing:
        time.sleep(AWAY_SECONDS)
    _engine.collectives.barrier(comm)
    comm.world.Barrier()
    time.sleep(1)  # the last messages


def read(comm, collector):
    """Reads the reports of all ranks, as one line of `keras-dist top` does."""
    end = time.monotonic() + REPORT_SECONDS
    if comm.rank == 0:
        job = collector.job()
        while any(row.age is None for row in job.rows) and time.monotonic() < end:
            time.sleep(0.5)  # ranks share cores
            job = collector.job()
        missing = [row.report.rank for row in job.rows if row.age is None]
        if missing:
            raise SystemExit(f"no report of ranks {missing}")
    comm.world.Barrier()


# --- what came out ---------------------------------------------------------------------------


def report(found, directory):
    text = ["# Messages of the root, counted", "", "Of the root, then the most of another rank."]
    head = ["", *(f"{ranks} ranks" for ranks in found)]
    rows = [[title, *(cell(run[name]) for run in found.values())] for name, title in TITLES.items()]
    text += ["", table(head, rows + all_to_the_root(found))]
    conclude(directory, "messages", text, judge(found))


def all_to_the_root(numbers):
    """Returns the rows of a table for a root that asks every rank, by numbers of ranks."""
    stall = [f"{STALL}, all to the root", *(f"{4 * (ranks - 1):,}" for ranks in numbers)]
    top = [f"{TITLES[TOP]}, all to the root", *(f"{2 * (ranks - 1):,}" for ranks in numbers)]
    return [stall, top]


def judge(found):
    """Returns the rows of what must hold for any number of ranks."""
    from keras_dist._engine.sideband import FANOUT

    rows = []
    # Of each child of the root: a question and two answers; up to two alarms in a period, each
    # with its confirmation.
    for names, most in ((FAULTS, 7 * FANOUT), ([TOP], 3 * FANOUT)):
        for name in names:
            for ranks, run in found.items():
                count = run[name][0]
                rows.append((f"{name}, {ranks} ranks", f"<= {most}", count, count <= most))
    return rows


def cell(count):
    return str(count) if isinstance(count, int) else " / ".join(map(str, count))


if __name__ == "__main__":
    main()
