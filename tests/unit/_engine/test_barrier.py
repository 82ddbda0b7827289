"""The barrier in shared memory: where it calls the fence of processors that reorder accesses."""

import numpy as np
import pytest

from keras_dist._engine.shm.node import ShmBarrier

DIGEST, OTHER = b"d" * 16, b"o" * 16


class Memory:
    """A segment in the memory of this process."""

    def __init__(self, size):
        self.memory = np.zeros(ShmBarrier.nbytes_for(size) + 64, np.uint8)
        start = -self.memory.ctypes.data % 64
        self.memory = self.memory[start : start + ShmBarrier.nbytes_for(size)]


@pytest.mark.parametrize("waits", [True, False], ids=["wait", "start"])
def test_the_fence_is_between_the_data_and_the_counters(waits):
    segment, events = Memory(2), []
    lines = segment.memory[:-64].reshape(2, ShmBarrier.LINES, 64)
    counters = lines[:, 0, :4].view(np.uint32).reshape(-1)

    def fence():
        digests = [lines[rank, 2, :16].tobytes() for rank in range(2)]
        events.append((counters.tolist(), digests))

    mine = ShmBarrier(segment, 0, 2, lambda: None, fence)
    theirs = ShmBarrier(segment, 1, 2, lambda: None)
    theirs.start(OTHER)
    assert (mine.wait(DIGEST) if waits else mine.start(DIGEST)()) is False
    written = [DIGEST, OTHER]
    # The digest is written before the first fence, the counter after it. The second one follows
    # when both counters are set, and the digests are compared after it.
    assert events == [([0, 1], written), ([1, 1], written)]
