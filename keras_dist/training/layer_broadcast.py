"""The broadcast of what layers compute with besides their variables."""

import contextlib
from collections.abc import Iterator

import keras

from keras_dist import _engine, errors
from keras_dist.training import layer_state
from keras_dist.training.differences import described, differing

LAYERS = "the broadcast of the layers of a model"
ADAPT = (
    "Adapt the layer with keras_dist.adapt, or on the root before the broadcast; pass the same "
    "constants on every rank."
)


@contextlib.contextmanager
def broadcast_layers(
    comm: _engine.Communicator, model: keras.Model, root_rank: int
) -> Iterator[None]:
    """Broadcasts what layers keep besides their variables, which are set in this context.

    Collective: the ranks of `comm`; blocks.
    """
    if not layer_state.is_stateful(model):
        yield
        return
    is_root = comm.job.rank == root_rank
    with _of_layers(comm):
        mine = layer_state.read(model) if is_root else None
    kept = _engine.collectives.broadcast_object(comm, mine, root_rank, LAYERS)
    with _of_layers(comm):
        kept = layer_state.without_local(model, kept)
        # First, since the shapes of variables may depend on the size of a vocabulary.
        layer_state.write_tables(model, kept)
    yield
    with _of_layers(comm):
        layer_state.refresh(model, None if is_root else kept)
    _check_layers_alike(comm, model)
    layer_state.retrace_if_changed(model)


@contextlib.contextmanager
def _of_layers(comm: _engine.Communicator) -> Iterator[None]:
    """Raises an error of a layer as a `MismatchError` on every rank."""
    with _engine.collectives.raise_on_all(comm, LAYERS):
        try:
            yield
        except Exception as error:  # of a user's method
            expected = "every layer to take the state that it has on the root"
            text = errors.explain(comm.where(), expected, str(error), ADAPT)
            raise errors.MismatchError(text) from error


def _check_layers_alike(comm: _engine.Communicator, model: keras.Model) -> None:
    found = layer_state.digests(model)
    if different := differing(comm, [digest for _, digest in found]):
        expected = f"the layers of model {model.name!r} to compute with the same on all ranks"
        text = described([name for name, _ in found], different)
        raise errors.MismatchError(comm.where(), expected, text, ADAPT)
