"""The comparison of gradients, by ranks that do not know which of them others reduce."""

from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_sets import COMPARISON, Form, GradientSet, UnlikeGradients
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature


@retried
def compare_gradients(
    comm: Communicator, gradients: GradientSet, remedy: str
) -> tuple[Form | None, ...]:
    """Returns the form of each gradient that any rank has.

    Collective: every rank; blocks. Other ranks may start to reduce instead: they repeat their
    rendezvous if they can reduce these gradients.
    """
    call = CollectiveSignature(COMPARISON, gradients=gradients, spares=True, remedy=remedy)
    try:
        with comm.lock:
            rendezvous(comm, call)
            if comm.faults.joined is not None:
                exchange_among(comm, None)
    except UnlikeGradients as found:
        return found.forms
    return gradients.forms
