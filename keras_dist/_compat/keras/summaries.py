"""Names of Keras: the summaries from which `Discretization` computes its boundaries."""

from keras_dist._compat.contract import Owner, require
from keras_dist._compat.keras.versions import version


def places_of(count: int, epsilon: float) -> tuple[range, float]:
    """Returns the places of the sorted values that summarize all, and the weight of each."""
    increment = count / (1.0 / epsilon)
    step = max(increment, 1)
    # Keras began with the value behind the first step before it began with its last one.
    summary = require(SUMMARIZE, version).summarize([float(n) for n in range(200)], 0.01)
    start = increment if summary[0][0] == 2 else step - 1
    return range(int(start), count, int(step)), step


SUMMARIZE = Owner("keras.src.layers.preprocessing.discretization").method(
    "summarize(values, epsilon)",
    "to summarize the values of all ranks as Keras does",
    "the boundaries of bins would differ from those of one process",
    on_use=True,
)

CONTRACT = (SUMMARIZE,)
