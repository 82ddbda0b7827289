"""Elastic states without a failure."""

import hashlib
import json

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import elastic, errors
from keras_dist.training import built_optimizers, model_state
from keras_dist.training.model_state import accumulators

pytestmark = pytest.mark.jobs("torch-2")

RANK = keras_dist.rank()


def model_of(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def values_of(model):
    return [keras.ops.convert_to_numpy(one) for one in [*model.weights, *model.optimizer.variables]]


def have(model, values):
    """Returns whether the variables of a model have these values."""
    return all((a == b).all() for a, b in zip(values_of(model), values, strict=True))


@pytest.mark.jobs("tensorflow-2")
def test_a_keras_state_is_synchronised_restored_and_found_in_its_directory(shared_tmp_path):
    model = model_of(seed=RANK)
    state = elastic.KerasState(model, directory=shared_tmp_path, epoch=RANK, batch=0)
    state.sync()
    assert state.epoch == 0
    synced = values_of(model)
    assert have(model, keras_dist.broadcast_object(synced))
    callbacks = [elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state)]
    x = np.ones((8, 2))
    model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert (state.epoch, state.batch) == (2, 0)
    assert not (values_of(model)[0] == synced[0]).all()
    state.restore()
    assert state.epoch == 0
    assert have(model, synced)
    # Whether Keras continues to count epochs or restarts.
    commit = elastic.CommitStateCallback(state, batches_per_commit=3)
    for options in ({"initial_epoch": 0, "epochs": 1}, {"epochs": 2}):
        model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[*callbacks, commit], **options)
    assert state.epoch == 3
    committed = values_of(model)
    model.fit(x, x[:, :1], verbose=0)
    state.restore()
    assert have(model, committed)
    other = model_of(seed=1)
    found = elastic.KerasState(other, directory=shared_tmp_path, epoch=0, batch=0)
    found.sync()
    assert found.epoch == 3
    assert have(other, committed)


def test_a_directory_of_earlier_versions_is_read(shared_tmp_path):
    model, folder = model_of(seed=0), shared_tmp_path / "state"
    model.optimizer.build(model.trainable_variables)
    variables = elastic.KerasState(model)._variables()
    if RANK == 0:
        arrays = {str(at): model_state.bytes_of(value) for at, value in enumerate(variables)}
        arrays["optimizers"] = np.array(json.dumps(built_optimizers.describe(model)))
        folder.mkdir()
        np.savez(folder / "new.npz", about=np.array(json.dumps({"epoch": 7})), **arrays)
        digest = hashlib.blake2b((folder / "new.npz").read_bytes(), digest_size=16).hexdigest()
        (folder / "new.npz").rename(folder / f"00000009-{digest}.npz")
    keras_dist.barrier()
    other = model_of(seed=1)
    found = elastic.KerasState(other, directory=folder, epoch=0)
    found.sync()
    assert found.epoch == 7
    assert have(other, values_of(model))
    found.commit()
    keras_dist.barrier()
    names = sorted(path.name[:8] for path in folder.iterdir())
    assert names == ["00000009", "00000010", "00000010"]  # the former one is the one before


@pytest.mark.jobs("tensorflow-2")
def test_gradients_that_are_accumulated_stay_each_ranks_own(shared_tmp_path):
    model = model_of(seed=RANK)
    optimizer = keras_dist.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2
    )
    model.compile(optimizer, "mse")
    state = elastic.KerasState(model, directory=shared_tmp_path)

    def gathered():
        return [np.unique(keras.ops.convert_to_numpy(one)) for one in accumulators([optimizer])]

    def forget():
        for one in accumulators([optimizer]):
            one.assign(one * 0)

    optimizer.apply([keras.ops.ones(one.shape) * (RANK + 1) for one in model.trainable_variables])
    assert gathered() == [RANK + 1] * 2
    state.sync()
    assert gathered() == [RANK + 1] * 2
    state.commit()
    forget()
    state.restore()
    assert gathered() == [RANK + 1] * 2
    forget()
    elastic.KerasState(model, directory=shared_tmp_path).sync()
    assert gathered() == [0, 0]


@pytest.mark.jobs("tensorflow-2")
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="variables of TensorFlow")
def test_a_state_of_tensorflows_variables(shared_tmp_path):
    import tensorflow as tf

    variables = [tf.Variable([RANK, 1.0], dtype=dtype) for dtype in ("float32", "bfloat16")]
    state = elastic.TensorFlowState(variables=variables, session=None, epoch=RANK)
    state.sync()
    assert state.epoch == 0
    assert [one.numpy().tolist() for one in variables] == [[0, 1], [0, 1]]
    variables[0].assign([2.0, 3.0])
    state.commit()
    variables[0].assign([4.0, 5.0])
    state.restore()
    assert variables[0].numpy().tolist() == [2, 3]
    elastic.TensorFlowState(variables, directory=shared_tmp_path, epoch=4).commit()
    others = [tf.Variable(tf.zeros_like(one)) for one in variables]
    found = elastic.TensorFlowState(others, directory=shared_tmp_path, epoch=0)
    found.sync()
    assert found.epoch == 4
    assert [one.numpy().tolist() for one in others] == [[2, 3], [0, 1]]


def test_what_horovods_states_take():
    state = elastic.TensorFlowKerasState(model_of(seed=0), None, keras.backend, epoch=RANK)
    state.commit()
    state.sync()
    assert state.epoch == 0

    class Counting(elastic.State):
        """Counts its synchronisations."""

        def __init__(self):
            super().__init__(bcast_object=keras_dist.broadcast_object, get_rank=keras_dist.rank)
            self.synced = 0
            self.begun_anew = []
            self.register_reset_callbacks([lambda: self.begun_anew.append("callback")])

        def sync(self):
            self.synced += 1

        def reset(self):
            self.begun_anew.append("reset")

    interrupts = [elastic.HostsUpdatedInterrupt(True), elastic.HostsUpdatedInterrupt(False)]

    @elastic.run
    def train(state):
        if interrupts:
            raise interrupts.pop()
        return state.synced

    state = Counting()
    assert train(state) == 2
    assert state.begun_anew == ["reset", "callback"] * 2
    elastic.ObjectState(epoch=0).on_reset()  # which has no state of its own


def test_an_error_of_all_ranks_goes_back_to_the_last_commit():
    state = elastic.ObjectState(step=RANK)
    resets, raised = [], []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @elastic.run
    def train(state):
        state.step += 1
        if len(raised) < 2:
            state.commit()
            state.step = 7 + RANK
            raised.append(state.step)
            raise elastic.HorovodInternalError("not a number")
        return state.step

    assert train(state) == 3
    assert resets == [1, 2]


@pytest.mark.skipif(keras_dist.size() == 1, reason="there is no other rank")
def test_an_error_of_one_rank_alone_is_an_error_of_all():
    @elastic.run
    def train(state):
        if keras_dist.size() - 1 == RANK:
            raise elastic.HorovodInternalError("not a number")
        return keras_dist.allreduce(1.0)

    with pytest.raises(errors.MismatchError, match="the return to the last commit"):
        train(elastic.ObjectState(step=0))


def test_an_object_state_takes_and_ignores_horovods_functions():
    functions = {"bcast_object": keras_dist.broadcast_object, "get_rank": keras_dist.rank}
    for state in (
        elastic.ObjectState(*functions.values(), epoch=RANK),
        elastic.ObjectState(**functions, epoch=RANK),
    ):
        state.sync()
        assert state.epoch == 0
        assert not set(functions) & set(vars(state))


def test_what_a_directory_cannot_keep_is_named(shared_tmp_path):
    state = elastic.ObjectState(directory=shared_tmp_path, best=np.float32(0.5), seen=None)
    state.commit()
    state.seen = {1, 2}
    with pytest.raises(errors.ArgumentTypeError, match=r"Expected seen to be .* a set"):
        state.commit()
    found = elastic.ObjectState(directory=shared_tmp_path, best=0.0, seen=None)
    found.sync()
    assert (found.best, found.seen) == (0.5, None)
    within = []
    within.append(within)
    for refused in ({0: 1.5}, [{"by epoch": {(1, 2): 0.5}}], np.ones(2), 1j, within):
        state.seen = refused
        with pytest.raises(errors.ArgumentTypeError, match="Expected seen to be"):
            state.commit()


def test_a_directory_gives_back_what_was_committed(shared_tmp_path):
    kept = [{"a": [1, -(2**70), 0.1, None, True], "\ud800\0": {}}, float("inf"), "\u00e9"]
    elastic.ObjectState(directory=shared_tmp_path, kept=kept, pair=(1, np.int8(2))).commit()
    found = elastic.ObjectState(directory=shared_tmp_path, kept=None, pair=None)
    found.sync()
    assert (found.kept, found.pair) == (kept, [1, 2])
