"""Jobs of the fault tests, from their start until nothing of them is left."""

import contextlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from start_jobs import HANG_SECONDS, allowed, is_alive, made_by, pids, wait_for

SCRIPTS = Path(__file__).with_name("scripts")


def end_of(job, folder):
    """Waits for a job, checks that nothing of it is left, and returns its output."""
    printed, _ = job.communicate(timeout=HANG_SECONDS)
    print(printed)
    all_gone(folder, printed)
    assert not left_in_shared_memory(folder)
    return printed


def opened(command, environment):
    """Returns a process whose output is read."""
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # as without nohup
    )


def end_after(act, ready, command, environment, hosts=(), within=180):
    """Runs a command, acts when a file is there, and returns exit code and output.

    The command ends, and no process is left on the hosts, `within` seconds after that.
    """
    with opened(command, environment) as job, ThreadPoolExecutor(1) as pool:
        output = pool.submit(job.communicate, timeout=HANG_SECONDS)
        try:
            wait_for(lambda: ready.exists() or output.done())
            begin = time.monotonic()
            act()  # its errors are those of the test
            printed, _ = output.result()
            print(printed)
            limit = allowed(within)  # once: the load falls while the test waits
            wait_for(lambda: not any(host.processes() for host in hosts), limit)
            assert time.monotonic() - begin < limit
        finally:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
            for host in hosts:
                host.kill_all()
    return job.returncode, printed


def discovery_script(folder, answer):
    """Returns a script for `--host-discovery-script`, and the file with its answer.

    It adds a line to the file `asked` each time.
    """
    script, file = folder / "discover", folder / "hosts"
    file.write_text(answer)
    script.write_text(f"#!/bin/sh\necho >> {folder / 'asked'}\ncat {file}\n")
    script.chmod(0o755)
    return script, file


def all_gone(folder, printed):
    """Waits until all processes of a job have ended; fails after some seconds."""
    wait_for(lambda: not any(map(is_alive, pids(folder))), allowed(5))
    moment, alive = time.time(), [pid for pid in pids(folder) if is_alive(pid)]
    assert not alive, printed
    return moment


def left_in_shared_memory(folder, but=None):
    """Returns files left in /dev/shm: mapped at the fault, or named after processes of the job.

    Files with `but` in their names are removed instead.
    """
    mapped = folder / "shared"
    found = set(mapped.read_text().splitlines()) if mapped.exists() else set()
    found |= made_by(pids(folder))
    left = {name for name in found if os.path.exists(name)}
    expected = {name for name in left if but is not None and but in name}
    for name in expected:
        os.unlink(name)
    return left - expected
