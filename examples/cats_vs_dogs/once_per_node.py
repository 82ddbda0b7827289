"""Work that one rank of each node does for the others, such as a download."""

import contextlib
import io
import socket

import keras_dist

PATIENCE_SECONDS = 10  # for an answer of the network


def once_per_node(work):
    """Lets one rank of each node work while the others wait.

    Rank 0 is the first: where nodes share a home directory, what it leaves there serves all.
    Collective: every rank must call it.

    Args:
        work: a function that does nothing where its result is there already.
    """
    for my_turn in (keras_dist.rank() == 0, keras_dist.local_rank() == 0):
        if my_turn:
            work()
        keras_dist.barrier()


def fetch(download):
    """Tries a download on each node; returns on all ranks whether every node has what it brings.

    Collective: every rank must call it.

    Args:
        download: a function that raises an error where the network does not answer.
    """
    outcomes = [True]

    def attempt():
        if outcomes[-1]:
            outcomes.append(_succeeds(download))

    once_per_node(attempt)
    return bool(keras_dist.allreduce(outcomes[-1], op=keras_dist.Min))


def _succeeds(download):
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_SECONDS)
    try:
        # Keras reports the download on the console; ranks would write over each other.
        with contextlib.redirect_stdout(io.StringIO()):
            download()
    except Exception as error:
        if keras_dist.rank() == 0:
            print(f"Cannot be downloaded: {error}")
        return False
    finally:
        socket.setdefaulttimeout(patience)
    return True
