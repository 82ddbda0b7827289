"""The directory in which a running job and the processes that want to join it find each other.

Files are JSON, written under another name and renamed. `job.json`: the job, as its root announces
it. `request-ID.json`: a process that is ready to join. `answer-ID.json`: the port of MPI that it
connects to, or why it cannot join. The directory belongs to the user, as the job does.
"""

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

__all__ = ["JobDirectory", "is_running"]

JOB = "job.json"
REQUEST, ANSWER, SUFFIX = "request-", "answer-", ".json"
POLL_SECONDS = 0.02

Facts = dict[str, Any]


class JobDirectory:
    """A directory of a job.

    Args:
        path: the directory; it is created when the job announces itself.
    """

    def __init__(self, path: str):
        self.path = Path(path)

    def announce(self, job: Facts) -> None:
        """Announces a job, or its new root."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(JOB, job)

    def withdraw(self) -> None:
        """Announces that the job takes no more ranks."""
        with contextlib.suppress(OSError):
            (self.path / JOB).unlink(missing_ok=True)

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

    def wait_for_answer(self, name: str) -> Facts | None:
        """Returns the answer to a request of this process; `None` if the job has ended. Blocks."""
        while True:
            job = self.job()
            if (facts := self._read(f"{ANSWER}{name}{SUFFIX}")) is not None:
                (self.path / f"{ANSWER}{name}{SUFFIX}").unlink(missing_ok=True)
                return facts
            if job is None or not is_running(job):
                return None
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


def is_running(process: Facts) -> bool:
    """Returns whether a process, by `host` and `pid`, runs; on another host it counts as such."""
    if process["host"] != os.uname().nodename:
        return True
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
