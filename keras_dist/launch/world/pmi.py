"""The server side of PMI-1, by which the ranks of MPICH learn about each other. Knows no sockets.

A rank sends commands such as `cmd=get kvsname=world key=address`, one a line, and each has one line
as its answer.
"""

import secrets
import threading

MAX_NAME, MAX_KEY, MAX_VALUE = 256, 64, 1024  # announced to the ranks
MAX_KEYS = 64  # for each rank


def fields(line: str) -> dict[str, str]:
    """Parses a command. A value that may hold spaces comes last, as `value=`."""
    head, _, value = line.strip().partition(" value=")
    found = dict(pair.split("=", 1) for pair in head.split() if "=" in pair)
    return {**found, "value": value} if value else found


class ProcessManager:
    """Answers the commands of the ranks of one world."""

    def __init__(self, size: int):
        self._size = size
        # MPICH derives the names of shared memory from it, so that each world needs its own.
        self._name = f"keras_dist_{secrets.token_hex(8)}"
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._arrived = 0
        self._barriers = 0
        self._closed = False

    def close(self) -> None:
        """Ends the barriers that ranks wait in, because the world has ended or a rank has left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def answer(self, command: dict[str, str]) -> str | None:
        """Returns the answer to a command; blocks in a barrier. `None`: there shall be none."""
        match command.get("cmd"):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                limits = f"kvsname_max={MAX_NAME} keylen_max={MAX_KEY} vallen_max={MAX_VALUE}"
                return f"cmd=maxes {limits} rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname={self._name} rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={self._size} rc=0"
            case "put":
                return self._put(command.get("key", ""), command.get("value", ""))
            case "get":
                return self._get(command.get("key", ""))
            case "barrier_in":
                return "cmd=barrier_out rc=0" if self._barrier() else None
            case "finalize":
                return "cmd=finalize_ack rc=0"
        return None

    def _put(self, key: str, value: str) -> str:
        with self._changed:
            if len(self._values) < MAX_KEYS * self._size and len(value) <= MAX_VALUE:
                self._values[key] = value
                return "cmd=put_result rc=0 msg=success"
        return "cmd=put_result rc=-1 msg=too_large"

    def _get(self, key: str) -> str:
        with self._changed:
            value = self._values.get(key)
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _barrier(self) -> bool:
        """Waits for all ranks; returns whether all came."""
        with self._changed:
            barrier = self._barriers
            self._arrived += 1
            if self._arrived == self._size:
                self._arrived = 0
                self._barriers += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._barriers > barrier)
            return self._barriers > barrier
