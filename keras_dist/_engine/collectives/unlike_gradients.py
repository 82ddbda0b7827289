"""Ranks that bring different gradients to a reduction compare them first, see `gradient_sets`."""

from keras_dist._engine.collectives.mismatch import mismatch
from keras_dist._engine.collectives.refusals import RepeatRendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_sets import COMPARISON, UnlikeGradients, difference_of_sets, union
from keras_dist._engine.signature import JOINED, CollectiveSignature, JoinedRanks


def settle_gradients(
    comm: Communicator,
    calls: list[CollectiveSignature],
    mine: CollectiveSignature,
    before: JoinedRanks | None,
) -> None:
    """Makes ranks that bring different gradients to a reduction compare them first.

    Collective: every rank of `comm`, within a rendezvous.
    """
    here = [index for index, call in enumerate(calls) if call.operation != JOINED]
    sets = [each for each in (calls[index].gradients for index in here) if each is not None]
    if len(sets) < len(here):
        return  # another operation
    ranks = [comm.ranks[index] for index in here]
    if (found := difference_of_sets(sets, ranks)) is not None:
        rank, expected, received, remedy = found
        raise mismatch(comm, rank, expected, received, remedy or calls[here[0]].remedy)
    forms, compares = union(sets), {calls[index].operation == COMPARISON for index in here}
    if len(compares) == 1 and all(each.forms == forms for each in sets):
        return
    comm.faults.joined = before
    if mine.gradients is not None:
        has_begun = bool(mine.bucket) and mine.gradients.adapts
        if mine.operation == COMPARISON or mine.gradients.forms != forms or has_begun:
            raise UnlikeGradients(forms)
    raise RepeatRendezvous  # others join in
