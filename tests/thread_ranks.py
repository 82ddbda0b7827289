"""Ranks that are threads, for tests of messages between more ranks than tests start."""

import queue
import threading
import time
from collections import defaultdict

__all__ = ["Network", "Rank"]

SECONDS = 120  # until ranks count as waiting for each other


class Network:
    """Some ranks; counts the messages that each sends."""

    def __init__(self, size):
        self.size, self.messages = size, [0] * size
        self.queues = defaultdict(queue.SimpleQueue)

    def run(self, work):
        """Calls a function with each rank; returns what it returns."""
        results = [None] * self.size

        def call(number):
            results[number] = work(Rank(self, number))

        threads = [
            threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
        return results

    @property
    def is_empty(self):
        """Whether every message has been received."""
        return all(messages.empty() for messages in self.queues.values())


class Rank:
    """The part of an MPI communicator that the engine uses for messages."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.network.size

    def Isend(self, buffer, peer, tag):
        self.network.messages[self.rank] += 1
        self.network.queues[self.rank, peer, tag].put(buffer.copy())
        return _Done()

    def Irecv(self, buffer, peer, tag):
        return _Receiving(self.network.queues[peer, self.rank, tag], buffer)


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
