"""The exchange of digests with other nodes, and of the numbers of a small bucket with them.

Nodes exchange in rounds, see `keras_dist._engine.rounds`: a message says what the sender brings,
and whether all that it has heard of bring the same.
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, combine
from keras_dist._engine.buckets import ALIGNMENT, aligned_array
from keras_dist._engine.rounds import Round, rounds

__all__ = ["MAX_PAYLOAD_NBYTES", "Message", "Payload", "Peers"]

MAX_PAYLOAD_NBYTES = 64 * 1024  # for larger buckets the number of bytes counts, not of messages
DIGEST = 2  # MPI tag
HEADER_NBYTES = ALIGNMENT  # the digest, and whether all digests are equal so far
DIGEST_NBYTES = 16


class Message:
    """Memory of a message: a header and the numbers of a bucket.

    Args:
        count: number of elements of the bucket.
        dtype: their dtype, that of sums as well.
        op: the reduction of two contributions.
    """

    def __init__(self, count: int, dtype: np.dtype, op: ReduceOp):
        self.memory = aligned_array(HEADER_NBYTES + count * dtype.itemsize, np.dtype(np.uint8))
        self.numbers = self.numbers_of(self.memory, dtype)
        self.op = op

    def numbers_of(self, message: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the numbers in the memory of a message of the same bucket."""
        return message[HEADER_NBYTES : self.memory.size].view(dtype or self.numbers.dtype)


@dataclasses.dataclass
class Payload:
    """A small bucket that is reduced over the nodes while the ranks compare their digests.

    Args:
        message: the message in which it travels.
        load: writes the contribution of this node into `message.numbers`, once all its ranks are
            there.
        result: array that receives the result.
        arrived: whether the last exchange has reduced the numbers; the same on all ranks.
    """

    message: Message
    load: Callable[[], None]
    result: np.ndarray
    arrived: bool = False


class Peers:
    """One rank of each node, which compare digests.

    Args:
        world: MPI communicator of these ranks.
    """

    def __init__(self, world: Any):
        self._world, self._rank = world, world.Get_rank()
        self._plan = rounds(self._rank, world.Get_size())
        self._header = np.zeros(HEADER_NBYTES, np.uint8)
        # Ranks that differ may send more than is expected.
        longest = HEADER_NBYTES + MAX_PAYLOAD_NBYTES
        self._received = aligned_array(longest, np.dtype(np.uint8))

    def compare(
        self, digest: bytes, same: bool, payload: Payload | None = None
    ) -> Generator[None, None, bool]:
        """Compares digests. Collective; yields while a message is missing.

        Args:
            digest: 16 bytes.
            same: whether all ranks of this node bring this digest.
            payload: numbers that are reduced if all bring the same. Defaults to none.

        Returns:
            Whether all ranks of all nodes bring the same digest; equal on all ranks.
        """
        message = self._header
        if payload is not None and same:
            payload.load()
            message = payload.message.memory
        header = message[: DIGEST_NBYTES + 1].data
        header[:DIGEST_NBYTES] = digest
        for step in self._plan:
            header[DIGEST_NBYTES] = same
            requests = []
            if step.receives:
                requests.append(self._world.Irecv(self._received, step.peer, DIGEST))
            if step.sends:
                # After a difference the numbers are of no use.
                sent = message if same else message[:HEADER_NBYTES]
                requests.append(self._world.Isend(sent, step.peer, DIGEST))
            for request in requests:
                while not request.Test():
                    yield
            if step.receives:
                theirs = self._received[: DIGEST_NBYTES + 1].tobytes()
                same = same and theirs[:-1] == digest and theirs[-1] == 1
                if payload is not None and same:
                    self._combine(payload, step)
        if payload is not None:
            payload.arrived = same
            if same and not self._plan[-1].receives:
                np.copyto(payload.result, payload.message.numbers)
        return same

    def _combine(self, payload: Payload, step: Round) -> None:
        """Adds what another node has sent, or takes the result from it."""
        mine, theirs = payload.message.numbers, payload.message.numbers_of(self._received)
        is_last = step is self._plan[-1]
        if is_last and not step.sends:
            np.copyto(payload.result, theirs)
            return
        left, right = (theirs, mine) if step.peer < self._rank else (mine, theirs)
        combine(left, right, payload.message.op, payload.result if is_last else mine)
