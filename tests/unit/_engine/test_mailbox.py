"""Messages that no rank waits for, where another rank has died; without MPI."""

import pytest

from keras_dist._engine.sideband import Mailbox


class World:
    """The part of an MPI communicator that a mailbox uses; another rank never closes its own."""

    def Dup(self):
        return self

    def improbe(self):
        return None

    def Ibarrier(self):
        return self

    def Test(self):
        return False


def test_a_close_ends_where_waiting_is_useless():
    checks = []

    def check():
        checks.append(None)
        if len(checks) == 3:
            raise ConnectionError("a rank has died")

    with pytest.raises(ConnectionError, match="a rank has died"):
        Mailbox(World()).close(check)
