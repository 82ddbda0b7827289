"""Ranks that are threads: messages and collectives between more ranks than tests start."""

import pickle
import queue
import threading
import time
import types
from collections import defaultdict

import numpy as np

__all__ = ["Network", "Rank", "mpi_of"]

SECONDS = 120  # until ranks count as waiting for each other


class Network:
    """Some ranks; counts the messages that each sends: one to every rank in a collective.

    Args:
        size: number of ranks.
        nodes: number of the node of each. Defaults to one rank on each.
    """

    def __init__(self, size, nodes=()):
        self.size, self.messages = size, [0] * size
        self.nodes = list(nodes) or list(range(size))
        self._queues, self._lock = defaultdict(queue.SimpleQueue), threading.Lock()

    def queue(self, sender, receiver, kind):
        """Returns the messages of a rank to another, which either may ask for first."""
        with self._lock:
            return self._queues[sender, receiver, kind]

    def run(self, work):
        """Calls a function with each rank; returns what it returns, or raises what one raises."""
        results, failures = [None] * self.size, []

        def call(number):
            try:
                results[number] = work(Rank(self, number))
            except BaseException as error:
                failures.append(error)
                raise

        threads = [
            threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        for thread in threads:
            while thread.is_alive() and not failures and time.monotonic() < end:
                thread.join(0.1)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
        return results

    @property
    def is_empty(self):
        """Whether every message has been received."""
        return all(messages.empty() for messages in self._queues.values())


class Rank:
    """The part of an MPI communicator that the engine uses."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.network.size

    def Isend(self, buffer, peer, tag=0):
        self.network.messages[self.rank] += 1
        self.network.queue(self.rank, peer, tag).put(buffer.copy())
        return _Done()

    def Irecv(self, buffer, peer, tag=0):
        return _Receiving(self.network.queue(peer, self.rank, tag), buffer)

    # --- Collectives

    def _send_to_all(self, value, kind):
        self.network.messages[self.rank] += self.network.size
        for peer in range(self.network.size):
            self.network.queue(self.rank, peer, kind).put(value)

    def _from_all(self, kind):
        return [self.network.queue(peer, self.rank, kind) for peer in range(self.network.size)]

    def _exchange(self, value):
        self._send_to_all(value, "collective")
        return [messages.get(timeout=SECONDS) for messages in self._from_all("collective")]

    def allgather(self, value):
        return [pickle.loads(raw) for raw in self._exchange(pickle.dumps(value))]

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def Barrier(self):
        self._exchange(None)

    def Bcast(self, buffer, root):
        buffer[...] = self._exchange(buffer.copy())[root]

    def Allgather(self, sent, received):
        received.reshape(-1)[:] = np.concatenate(self._exchange(sent.copy()))

    def Allgatherv(self, sent, received):
        buffer, counts, *starts, _ = received
        ends = np.cumsum(counts) if not starts else np.add(starts[0], counts)
        parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        mine = buffer[parts[self.rank]] if sent is IN_PLACE else sent
        for part, row in zip(parts, self._exchange(mine.copy()), strict=True):
            buffer[part] = row

    def Alltoallv(self, sent, received):
        buffer, counts, _ = sent
        rows = self._exchange(np.split(buffer[: sum(counts)].copy(), np.cumsum(counts)[:-1]))
        received[0][: sum(received[1])] = np.concatenate([row[self.rank] for row in rows])

    def Allreduce(self, sent, received, op):
        mine = received if sent is IN_PLACE else sent
        received[...] = op.reduce(self._exchange(mine.copy()))

    def Iallreduce(self, sent, received, op):
        self._send_to_all(sent.copy(), "nonblocking")
        return _Reducing(self._from_all("nonblocking"), received, op)

    # --- Communicators

    def Split(self, color=0, key=0):
        everyone = self._exchange((color, key, self.rank))
        ranks = [rank for other, _, rank in sorted(everyone) if other == color]
        mine = Network(len(ranks), [self.network.nodes[rank] for rank in ranks])
        return Rank(self._exchange(mine)[ranks[0]], ranks.index(self.rank))

    def Split_type(self, _, key=0):
        return self.Split(self.network.nodes[self.rank], key)

    def Dup(self):
        return self.Split(0, self.rank)

    def Free(self):
        pass

    def improbe(self, tag=0):
        return None  # no rank greets another


IN_PLACE = object()


def mpi_of(rank):
    """Returns what a thread uses in place of mpi4py's `MPI` module.

    Args:
        rank: the `Rank` of the thread in a network of all ranks.
    """
    return types.SimpleNamespace(
        COMM_WORLD=rank,
        COMM_TYPE_SHARED=0,
        IN_PLACE=IN_PLACE,
        MIN=np.minimum,
        MAX=np.maximum,
        SUM=np.add,
        PROD=np.multiply,
        THREAD_MULTIPLE=3,
        Query_thread=lambda: 3,
        Wtime=time.perf_counter,
        Exception=OSError,
    )


class _Done:
    def Test(self):
        return True


class _Receiving:
    def __init__(self, messages, buffer):
        self.messages, self.buffer, self.is_done = messages, buffer, False

    def Test(self):
        if not self.is_done:
            try:
                message = self.messages.get_nowait()
            except queue.Empty:
                return False
            self.buffer[: message.size] = message  # a longer message is an error, as in MPI
            self.is_done = True
        return True

    def Cancel(self):
        self.is_done = True


class _Reducing:
    def __init__(self, queues, result, op):
        self.queues, self.result, self.op, self.rows = queues, result, op, []

    def Test(self):
        while len(self.rows) < len(self.queues):
            try:
                self.rows.append(self.queues[len(self.rows)].get_nowait())
            except queue.Empty:
                return False
        self.result[...] = self.op.reduce(self.rows)
        return True
