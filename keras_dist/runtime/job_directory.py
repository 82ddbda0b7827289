"""The directory in which a running job and the processes that want to join it find each other.

Files are JSON, written under another name and renamed. `job.json`: the job, as its root announces
it. `place-HOST-N.json`: a process that is to join, with the local rank N. `request-ID.json`: one
that is ready to join. `answer-ID.json`: the port of MPI that it connects to, or why it cannot join.
The directory belongs to the user, as the job does.
"""

import contextlib
import itertools
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

JOB = "job.json"
PLACE, REQUEST, ANSWER, SUFFIX = "place-", "request-", "answer-", ".json"
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0

Facts = dict[str, Any]


class JobDirectory:
    """A directory of a job."""

    def __init__(self, path: str):
        self.path = Path(path)
        self._next_look = 0.0  # of `is_asked`, on the monotonic clock

    def announce(self, job: Facts) -> None:
        """Announces a job, or its new root."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(JOB, job)

    def withdraw(self) -> None:
        """Announces that the job takes no more ranks."""
        with contextlib.suppress(OSError):
            (self.path / JOB).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes what a job has left that could not withdraw."""
        with contextlib.suppress(OSError):
            for entry in os.listdir(self.path):
                if entry == JOB or entry.startswith((PLACE, REQUEST, ANSWER)):
                    (self.path / entry).unlink(missing_ok=True)

    def claim(self, first: int) -> int | None:
        """Returns a local rank for this process that no other process of its host claims.

        Returns:
            The local rank; `None` if the job has ended and its directory is gone.
        """
        host = os.uname().nodename
        for number in itertools.count(first):
            name = f"{PLACE}{host}-{number}{SUFFIX}"
            holder = self._read(name)
            has_ended = holder is not None and not is_running(holder)
            # Of several processes that find the same one ended, a single one creates this file.
            first_of_all = f"{name}.after-{holder['pid']}" if holder and has_ended else name
            try:
                with open(self.path / first_of_all, "x"):
                    pass
            except FileExistsError:
                continue
            except FileNotFoundError:
                return None
            self._write(name, {"host": host, "pid": os.getpid()})
            return number
        raise AssertionError

    def job(self) -> Facts | None:
        """Returns the announced job; `None` if there is none."""
        return self._read(JOB)

    def request(self, facts: Facts) -> str:
        """Asks, for this process, to join; returns the id of the request."""
        name = secrets.token_hex(8)
        self._write(f"{REQUEST}{name}{SUFFIX}", facts)
        return name

    def requests(self) -> dict[str, Facts]:
        """Returns the requests without an answer, by id."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(self.path)):
                if entry.startswith(REQUEST) and (facts := self._read(entry)) is not None:
                    found[entry.removeprefix(REQUEST).removesuffix(SUFFIX)] = facts
        return found

    def answer(self, name: str, facts: Facts) -> None:
        """Answers a request."""
        self._write(f"{ANSWER}{name}{SUFFIX}", facts)
        (self.path / f"{REQUEST}{name}{SUFFIX}").unlink(missing_ok=True)

    def is_asked(self) -> bool:
        """Returns whether processes ask to join, and shows them that the job is alive.

        The directory may be on a slow file system: it is read every `LOOK_SECONDS` at most.
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        with contextlib.suppress(OSError):
            os.utime(self.path / JOB)
        return bool(self.requests())

    def wait_for_answer(self, name: str, limit_seconds: float) -> Facts | None:
        """Returns the answer to a request of this process; `None` if the job has ended. Blocks.

        Args:
            limit_seconds: how long to wait without a sign of the job, see `is_asked`; a job on
                another host may have been killed. 0: without limit.
        """
        sign, since = None, time.monotonic()
        while True:
            job = self.job()
            if (facts := self._read(f"{ANSWER}{name}{SUFFIX}")) is not None:
                (self.path / f"{ANSWER}{name}{SUFFIX}").unlink(missing_ok=True)
                return facts
            if job is None or not is_running(job):
                return None
            # Compared with itself alone: clocks of hosts differ.
            if (latest := self._changed(JOB)) != sign:
                sign, since = latest, time.monotonic()
            elif limit_seconds and time.monotonic() - since > limit_seconds:
                (self.path / f"{REQUEST}{name}{SUFFIX}").unlink(missing_ok=True)
                raise TimeoutError(f"no sign of the job for {limit_seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _write(self, name: str, facts: Facts) -> None:
        path = self.path / f".{secrets.token_hex(8)}"
        path.write_text(json.dumps(facts))
        os.replace(path, self.path / name)

    def _read(self, name: str) -> Facts | None:
        try:
            found: Facts = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return found

    def _changed(self, name: str) -> int | None:
        """Returns when a file was changed; `None` if there is none."""
        try:
            return (self.path / name).stat().st_mtime_ns
        except OSError:
            return None


def is_running(process: Facts) -> bool:
    """Returns whether a process, by `host` and `pid`, runs; on another host it counts as such."""
    return process["host"] != os.uname().nodename or is_alive(process["pid"])


def is_alive(pid: int) -> bool:
    """Returns whether a process of this node runs; one that has ended may wait for its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return True
