"""Data on a disk of each node: brought there once, by one rank, while the others wait."""

import contextlib
import dataclasses
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keras_dist import errors, ops, runtime
from keras_dist.data import consistency
from keras_dist.data.fetching import Fetch, NotOwnError, hold, is_url
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["cached"]

MEETING_SECONDS = 0.5
LINE_SECONDS = 5.0
SAME = "Pass the same arguments to cached() on every rank."


def cached(
    source: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    unpack: bool = False,
) -> str:
    """Returns where a copy of a file, directory or download lies on this node.

    One rank of each node brings it there, unless it is there already, and the others wait; ranks
    of other jobs on the node wait as well, and find it. It is there whole or not at all. The root
    shows a bar with size and time. A file is copied anew when its size or time has changed, a
    directory when its own time has; what was downloaded is kept. Jobs that have the copy before
    keep it: it is removed when somebody asks for the source after they have ended.

    A user's copies lie in a directory of `cache_dir` that this user alone can read and write;
    what belongs to somebody else is refused. With a copy the digests of all its files are noted.
    Whenever it is there already they are compared, which reads all of it, and what has changed is
    brought again, with a warning.

    Collective: every rank, with the same arguments but for `cache_dir`; blocks, however long it
    takes. An error on one node is raised on all ranks.

    Args:
        source: a path that one rank of each node can read, or a URL (`http`, `https`).
        cache_dir: a directory on a disk of the node; made if it is not there. What is in it stays
            until you remove it. It and the directories above belong to you or to root, and not
            everybody may write to them, unless their sticky bit is set, as that of `/tmp` is.
        sha256: the checksum of the file or archive, 64 hexadecimal digits; not for a directory. It
            is compared when the file comes. Defaults to not known.
        unpack: whether it is a tar or zip file whose contents are wanted. Defaults to False.

    Returns:
        The path of the copy, whose last part is that of `source`: with `unpack` a directory.

    Raises:
        DataError: it cannot be read, written or unpacked on some node, it was cut off, its
            checksum is another, or what lies in the cache belongs to another user.
        ArgumentError: `sha256` is no checksum, or of a directory.
        ArgumentTypeError: an argument is of the wrong kind.
        MismatchError: the ranks have different arguments.

    Example:
    ```python
    train = keras_dist.data.cached("train/0.tar", "cache", unpack=True)
    dataset = keras_dist.data.image_dataset(train, image_size=(224, 224))
    ```
    """
    fetch = consistency.prepare(lambda: _Wanted(source, cache_dir, sha256, unpack))
    began = time.monotonic()
    with _working(fetch if runtime.local_rank() == 0 else None) as work, _bar(fetch) as show:
        while True:
            reports = ops.allgather_object(work.report(), name="data.cached")
            show(reports)
            failures = [report.failure for report in reports if report.failure is not None]
            if failures or all(report.ended for report in reports):
                break
            # So seldom that it costs nothing, and never so seldom that a rank seems stuck.
            work.thread.join(MEETING_SECONDS)
    if failures:
        raise errors.DataError(failures[0])
    _say(fetch, reports, time.monotonic() - began)
    path = reports[runtime.communicator().topology.first_on_node].path
    hold(Path(path))
    return path


class _Wanted:
    """The arguments, checked."""

    held = None

    def __init__(
        self,
        source: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str],
        sha256: str | None,
        unpack: bool,
    ):
        terms = ShardOptions()
        for what, path in (("source", source), ("cache_dir", cache_dir)):
            if not isinstance(path, str | os.PathLike):
                raise terms.wrong_kind(f"{what} to be a path", path)
        name = os.fspath(source)
        if not is_url(name):
            name = os.path.abspath(name)
        if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
            remedy = "Pass what sha256sum prints."
            raise errors.ArgumentError(
                terms.explain("sha256 to be 64 hexadecimal digits", repr(sha256), remedy)
            )
        if sha256 is not None and os.path.isdir(name):
            remedy = "Leave it out."
            raise errors.ArgumentError(
                terms.explain("no sha256 for a directory", f"one for {name}", remedy)
            )
        self._fetch = Fetch(name, Path(cache_dir), sha256 and sha256.lower(), unpack)
        said = {"source": name, "sha256": sha256, "unpack": unpack}
        self.facts = [Fact(label, value, SAME) for label, value in said.items()]

    def part(self, held: Sequence[None]) -> Fetch:
        """Returns what is to be brought."""
        return self._fetch


@dataclasses.dataclass(frozen=True)
class _Report:
    """How far a rank is; and where it is then, on the first rank of each node."""

    ended: bool
    failure: str | None
    done_nbytes: int
    total_nbytes: int
    fetched: bool
    path: str


class _Work:
    """What this rank brings, in a thread; `None`: another one does."""

    def __init__(self, fetch: Fetch | None):
        self._fetch = fetch
        self._failure: str | None = None
        self.thread = threading.Thread(target=self._run, name="keras_dist cache", daemon=True)

    def _run(self) -> None:
        if self._fetch is None:
            return
        try:
            self._fetch.run()
        except NotOwnError as failure:
            told = failure.expected, failure.received, failure.remedy
            self._failure = errors.explain(_where(), *told)
        except Exception as failure:  # the other ranks have to hear of it, whatever it is
            self._failure = errors.explain(
                _where(),
                f"{self._fetch.source} to be brought to {self._fetch.cache_dir}",
                f"{type(failure).__name__}: {failure}",
                "Look at both places on that node.",
            )

    def report(self) -> _Report:
        """Returns how far this rank is."""
        ended = not self.thread.is_alive()
        fetch = self._fetch
        if fetch is None:
            return _Report(True, None, 0, 0, False, "")
        done, total = fetch.done_nbytes, fetch.total_nbytes
        return _Report(ended, self._failure, done, total, ended and fetch.fetched, str(fetch.path))


def _where() -> str:
    return f"{runtime.where()} on {platform.node()}"


@contextlib.contextmanager
def _working(fetch: Fetch | None) -> Iterator[_Work]:
    work = _Work(fetch)
    work.thread.start()
    try:
        yield work
    finally:
        if fetch is not None:
            fetch.stop.set()
        work.thread.join()


@contextlib.contextmanager
def _bar(fetch: Fetch) -> Iterator[Callable[[Sequence[_Report]], None]]:
    """Shows on the root how far all nodes are together: a bar, or lines where there is no terminal.

    mpiexec is no terminal to its ranks.
    """
    from rich import console, progress

    is_terminal = console.Console().is_terminal
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        disable=runtime.rank() != 0 or not is_terminal,
        transient=True,
    )
    task = bar.add_task(f"caching {fetch.name}", total=None)
    told = began = time.monotonic()

    def show(reports: Sequence[_Report]) -> None:
        nonlocal told
        total = sum(report.total_nbytes for report in reports)
        done = sum(report.done_nbytes for report in reports)
        words = f"{fetch.doing} {fetch.name}"
        bar.update(task, description=words, total=total or None, completed=done)
        now = time.monotonic()
        if not is_terminal and runtime.rank() == 0 and now - told >= LINE_SECONDS:
            told = now
            of_all = f" of {total / 1e6:,.1f}" if total else ""
            line = f"{done / 1e6:,.1f}{of_all} MB after {now - began:.0f} s"
            print(f"keras_dist: {words}: {line}", flush=True)

    with bar:
        yield show


def _say(fetch: Fetch, reports: Sequence[_Report], seconds: float) -> None:
    nodes = sum(report.fetched for report in reports)
    if nodes and runtime.rank() == 0:
        nbytes = sum(report.done_nbytes for report in reports if report.fetched)
        what = f"{nbytes / 1e6:,.1f} MB in {seconds:.1f} s"
        where = f"{nodes} node{'s' if nodes > 1 else ''}"
        print(f"keras_dist: {fetch.name} is cached now on {where}, {what}.", flush=True)
