"""The state of a rank for messages: its waits, its progress, its Python stacks."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.faults.progress import describe_progress, is_single
from keras_dist._engine.shm.wait import waits
from keras_dist._engine.sideband import Ranks

MAX_STACKS = 16_000  # characters from one rank
MAX_NAMED = 16  # ranks


def lost(where: str, ranks: Sequence[int]) -> errors.RankLostError:
    """Returns the error of a rank that has seen other ranks die."""
    return errors.RankLostError(
        where,
        "all ranks to come",
        f"{have(ranks)} died",
        "See its last output, the system log (out of memory) or the log of the batch system. "
        "KERAS_DIST_ON_FAILURE=continue continues without it.",
    )


def have(ranks: Sequence[int]) -> str:
    """Returns the subject of a sentence on ranks, such as `rank 1 has`."""
    return f"{format_rank_list(ranks, len(ranks))} {'has' if len(ranks) == 1 else 'have'}"


@dataclasses.dataclass(frozen=True)
class RankState:
    """The waits of a rank (ranks, operation and seconds), its progress, and its stacks."""

    waits: tuple[tuple[Ranks, str, float], ...]
    progress: str  # empty where several threads run tasks, whose operations have theirs
    stacks: str

    def __reduce__(self) -> Any:
        # Ranks that wait in the same place have the same stacks, which a message holds once.
        return RankState, (self.waits, self.progress, sys.intern(self.stacks))

    def waiting_with(self, ranks: Ranks) -> tuple[str, float] | None:
        """Returns the operation and the seconds of its wait among these ranks, if there is one."""
        return next((wait[1:] for wait in self.waits if wait[0] == ranks), None)


def current_state() -> RankState:
    """Returns the state of this rank."""
    now, is_clear = time.perf_counter(), is_single()
    found = tuple(
        (
            tuple(ranks),
            describe_operation(what, "" if is_clear else describe_progress(ranks)),
            now - began,
        )
        for ranks, what, began in waits()
    )
    return RankState(found, describe_progress() if is_clear else "", _stacks())


def _stacks() -> str:
    """Returns the Python stacks of the threads of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    mine = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != mine}
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, names.get(ident, ""))):
        stack = "".join(traceback.format_stack(frames[ident]))
        parts.append(f"  Thread {names.get(ident, ident)}:\n{stack}")
    return "".join(parts)[:MAX_STACKS].rstrip()


def describe_operation(what: Any, progress: str) -> str:
    """Describes an operation and the progress of the rank in it."""
    several = len(getattr(what, "buckets", ())) > 1 and what.bucket is not None
    text = f"{what}, bucket {what.bucket}" if several else str(what)
    return f"{text} ({progress})" if progress else text


def format_rank_list(ranks: Iterable[int], most: int = MAX_NAMED) -> str:
    """Names ranks, such as `ranks 0, 2`; at most the first of many."""
    every = list(ranks)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    named = ", ".join(map(str, every[:most]))
    return f"rank{'s' if len(every) > 1 else ''} {named}{more}"


def is_stopped(node: str, pid: int) -> bool:
    """Returns whether a process of this node is stopped; `False` for other nodes."""
    if node == os.uname().nodename:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    return False
