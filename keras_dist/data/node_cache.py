"""Copies of data on a local disk of each node, made by one rank while the others wait."""

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from keras_dist import errors, ops, runtime
from keras_dist.data import consistency
from keras_dist.data.fetching import Fetch, NotOwnError, hold, is_url
from keras_dist.data.shard_options import Fact, wrong_kind

REPORT_SECONDS = 0.5
LINE_SECONDS = 5.0
SAME = "Pass the same arguments to cached() on every rank."


def cached(
    source: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    unpack: bool = False,
) -> str:
    """Copies a file, directory or download to this node, and returns the path of the copy.

    One rank of each node makes the copy, unless it exists, and the others wait, also ranks of other
    jobs on the node. The copy is complete or absent. Rank 0 shows a progress bar. A file is copied
    again when its size or modification time has changed, a directory when its own modification time
    has; a download is kept. Jobs that use an old copy keep it: a later call for the source, after
    they have ended, removes it.

    The copies of a user are in a directory of `cache_dir` that only this user can access; files of
    other users are refused. Sizes and modification times of all files are recorded with the copy
    and compared at every later use; a changed copy is made again, with a warning.

    Collective: every rank, with the same arguments except `cache_dir`; blocks as long as it takes.
    An error on one node is raised on all ranks.

    Args:
        source: a path that one rank of each node can read, or a URL (`http`, `https`).
        cache_dir: a directory on a local disk of the node; it is made if it does not exist. Its
            contents stay until you remove them. It and its parents must belong to you or to root,
            and others must not be able to write to them, unless the sticky bit is set, as for
            `/tmp`.
        sha256: SHA-256 of the file or archive, 64 hexadecimal digits; not for a directory. It is
            compared when the file is copied. Defaults to `None`: unknown.
        unpack: whether to unpack a tar or zip file. Defaults to `False`.

    Returns:
        Path of the copy, with the last part of `source`; a directory with `unpack`.

    Raises:
        DataError: the source cannot be read, written or unpacked on a node, is truncated or has
            another checksum, or the copy belongs to another user.
        ArgumentError: `sha256` is not a checksum, or `source` is a directory.
        ArgumentTypeError: an argument is of the wrong type.
        MismatchError: the ranks have different arguments.

    Example:
    ```python
    train = keras_dist.data.cached("train/0.tar", "cache", unpack=True)
    dataset = keras_dist.data.image_dataset(train, image_size=(224, 224))
    ```
    """
    fetch = consistency.prepare(lambda: _request(source, cache_dir, sha256, unpack))
    began = time.monotonic()
    work = _Work(fetch)
    try:
        with _bar(fetch) as show:
            while True:
                reports = ops.allgather_object(work.report(), name="data.cached")
                show(reports)
                failures = [report.failure for report in reports if report.failure is not None]
                if failures or all(report.ended for report in reports):
                    break
                # Rare enough to cost nothing, frequent enough that no rank seems stalled.
                work.thread.join(REPORT_SECONDS)
    finally:
        fetch.stop.set()
        work.thread.join()
    if failures:
        raise errors.DataError(failures[0])
    _log_summary(fetch, reports, time.monotonic() - began)
    path = reports[runtime.communicator().topology.first_on_node].path
    hold(Path(path))
    return path


def _request(
    source: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    sha256: str | None,
    unpack: bool,
) -> consistency.Compared:
    """Returns the entry of the cache, and the arguments, which all ranks compare."""
    for what, path in (("source", source), ("cache_dir", cache_dir)):
        if not isinstance(path, str | os.PathLike):
            raise wrong_kind(f"{what} to be a path", path)
    name = os.fspath(source)
    if not is_url(name):
        name = os.path.abspath(name)
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        remedy = "Pass the output of sha256sum."
        raise errors.ArgumentError("sha256 to be 64 hexadecimal digits", repr(sha256), remedy)
    if sha256 is not None and os.path.isdir(name):
        remedy = "Leave it out."
        raise errors.ArgumentError("no sha256 for a directory", f"one for {name}", remedy)
    fetch = Fetch(name, Path(cache_dir), sha256 and sha256.lower(), unpack)
    compared = {"source": name, "sha256": sha256, "unpack": unpack}
    facts = [Fact(label, value, SAME) for label, value in compared.items()]
    return consistency.Compared(facts, fetch)


class _Report(NamedTuple):
    """Progress of a rank, and the path of the copy on the first rank of each node."""

    ended: bool = True
    failure: str | None = None
    done_nbytes: int = 0
    total_nbytes: int = 0
    fetched: bool = False
    path: str = ""


class _Work:
    """A thread that makes the copy on the first rank of a node."""

    def __init__(self, fetch: Fetch):
        self._fetch = fetch
        self._failure: str | None = None
        self._is_first = runtime.local_rank() == 0
        self.thread = threading.Thread(target=self._run, name="keras_dist cache", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        if not self._is_first:
            return
        where = f"{runtime.where()} on {platform.node()}"
        try:
            self._fetch.run()
        except NotOwnError as failure:
            parts = failure.expected, failure.received, failure.remedy
            self._failure = errors.explain(where, *parts)
        except Exception as failure:  # raised on all ranks
            self._failure = errors.explain(
                where,
                f"{self._fetch.source} to be copied to {self._fetch.cache_dir}",
                f"{type(failure).__name__}: {failure}",
                "Check both paths on that node.",
            )

    def report(self) -> _Report:
        """Returns the progress of this rank."""
        if not self._is_first:
            return _Report()
        ended, fetch = not self.thread.is_alive(), self._fetch
        done, total = fetch.done_nbytes, fetch.total_nbytes
        return _Report(ended, self._failure, done, total, ended and fetch.fetched, str(fetch.path))


@contextlib.contextmanager
def _bar(fetch: Fetch) -> Iterator[Callable[[Sequence[_Report]], None]]:
    """Shows the progress of all nodes on rank 0: a bar, or lines without a terminal."""
    from rich import console, progress

    # Under mpiexec a rank has no terminal.
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
    printed = began = time.monotonic()

    def show(reports: Sequence[_Report]) -> None:
        nonlocal printed
        total = sum(report.total_nbytes for report in reports)
        done = sum(report.done_nbytes for report in reports)
        bar.update(task, total=total or None, completed=done)
        now = time.monotonic()
        if not is_terminal and runtime.rank() == 0 and now - printed >= LINE_SECONDS:
            printed = now
            of_all = f" of {total / 1e6:,.1f}" if total else ""
            line = f"{done / 1e6:,.1f}{of_all} MB after {now - began:.0f} s"
            print(f"keras_dist: caching {fetch.name}: {line}", flush=True)

    with bar:
        yield show


def _log_summary(fetch: Fetch, reports: Sequence[_Report], seconds: float) -> None:
    nodes = sum(report.fetched for report in reports)
    if nodes and runtime.rank() == 0:
        nbytes = sum(report.done_nbytes for report in reports if report.fetched)
        what = f"{nbytes / 1e6:,.1f} MB in {seconds:.1f} s"
        where = f"{nodes} node{'s' if nodes > 1 else ''}"
        print(f"keras_dist: {fetch.name} is cached now on {where}, {what}.", flush=True)
