"""Processes that join a running job, on slots that the discovery script adds."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from keras_dist import errors
from keras_dist.launch.cli.discovery import ask
from keras_dist.launch.cli.job import end_with_parent
from keras_dist.runtime.job_directory import JobDirectory

PAUSE_SECONDS = 5.0  # between questions
ANSWER_SECONDS = 10.0
END_SECONDS = 10.0  # for the processes to end after the job
KILL_SECONDS = 5.0


class Joiners:
    """Asks the discovery script while a job runs, and starts a process on each further slot."""

    def __init__(
        self,
        script: Sequence[str],
        directory: str,
        ranks: Mapping[str, int],
        limit: int | None,
        command_on: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
    ):
        self._script, self._directory = script, JobDirectory(directory)
        self._ranks, self._used, self._limit = ranks, dict(ranks), limit
        self._command_on, self._environment = command_on, environment
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._has_ended = threading.Event()

    @contextlib.contextmanager
    def beside_the_job(self) -> Iterator[None]:
        """Runs in a thread while the job runs; at the end no process is left."""
        thread = threading.Thread(target=self._run, name="keras_dist joiners", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            thread.join()

    def _run(self) -> None:
        # The processes end with the thread that has started them, see `end_with_parent`.
        try:
            while not self._has_ended.wait(PAUSE_SECONDS):
                if self._directory.job() is not None:
                    self._start_on_new_slots()
        finally:
            self._end()

    def _start_on_new_slots(self) -> None:
        self._forget_ended()
        # At the start a script that fails is an error. While the job runs it is asked again.
        named, trouble = ask(self._script, ANSWER_SECONDS)
        if trouble is not None:
            return
        busy = dict(self._ranks)
        for host, _ in self._running:
            busy[host] = busy.get(host, 0) + 1
        for host in new_slots(named, self._used, busy, self._limit):
            if not self._has_ended.is_set():
                self._start(host)

    def _start(self, host: str) -> None:
        try:
            process = subprocess.Popen(
                self._command_on(host),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except (OSError, errors.KerasDistError) as error:
            _print(f"no process was started on {host}: {error}")
        else:
            _print(f"started a process on {host}, which asks to join the job.")
            self._running.append((host, process))

    def _forget_ended(self) -> None:
        for host, process in self._running:
            if process.poll():
                _print(f"a process on {host} ended with exit code {process.returncode}.")
        self._running = [pair for pair in self._running if pair[1].returncode is None]

    def _end(self) -> None:
        """Waits for the processes, and ends those that have not joined."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                for _, process in self._running:
                    process.send_signal(number)
            end = time.monotonic() + (END_SECONDS if number is None else KILL_SECONDS)
            for _, process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            self._forget_ended()


def slots_in_use(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the number of ranks on each host, where hosts are filled in turn."""
    used = {}
    for name, slots in hosts.items():
        used[name] = min(slots, ranks)
        ranks -= used[name]
    return used


def new_slots(
    named: Mapping[str, int], used: dict[str, int], busy: Mapping[str, int], limit: int | None
) -> list[str]:
    """Returns the host of each slot on which a process is to start, and counts it in `used`.

    The slot of a process that has ended is free again when the script has not named it meanwhile.
    """
    found: list[str] = []
    for host in used:
        used[host] = max(busy.get(host, 0), min(used[host], named.get(host, 0)))
    for host, slots in named.items():
        free = slots - used.get(host, 0)
        if limit is not None:
            free = min(free, limit - sum(busy.values()) - len(found))
        if free > 0:
            used[host] = used.get(host, 0) + free
            found += [host] * free
    return found


def _print(text: str) -> None:
    print(f"keras-dist: {text}", file=sys.stderr, flush=True)
