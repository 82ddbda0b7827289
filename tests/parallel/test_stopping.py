"""All ranks stop training after the same step, whichever rank stops."""

import keras
import numpy as np
import pytest
from training import agreed, make_data, make_model

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import AgreeOnStoppingCallback, RootOnly


class Steps(keras.callbacks.Callback):
    """Counts the steps of a fit without making Keras call batch hooks synchronously."""

    async_safe = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1


class StopAt(keras.callbacks.Callback):
    """Stops at the `at`th call of one hook on one rank."""

    def __init__(self, hook, at, rank):
        super().__init__()
        self.left, self.rank = at, rank
        setattr(self, hook, self._hook)

    def _hook(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and keras_dist.rank() == self.rank:
            self.model.stop_training = True


def steps_of(*callbacks, sample_weight=None, appended=()):
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model(optimizer, run_eagerly=True)
    steps = Steps()
    model.fit(
        *make_data(20, seed=keras_dist.rank()),
        sample_weight=sample_weight,
        batch_size=4,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[steps, *keras_dist.callbacks(*callbacks), *appended],
    )
    keras_dist.verify_replicas(model)
    assert agreed(steps.count)
    return steps.count


@pytest.mark.parity("a stop on one rank stops all after the same step")
@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("on_train_begin", 1, 1),
        ("on_epoch_begin", 2, 6),
        ("on_train_batch_begin", 3, 3),
        ("on_train_batch_end", 7, 7),
        ("on_epoch_end", 2, 10),
    ],
)
def test_a_stop_on_one_rank_stops_all_after_the_same_step(hook, at, steps):
    assert steps_of(StopAt(hook, at, rank=keras_dist.size() - 1)) == steps


@pytest.mark.parametrize(
    ("hook", "at", "steps"), [("on_train_batch_end", 7, 7), ("on_epoch_end", 2, 10)]
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_callback_behind_the_list_stops_all_after_the_same_step(hook, at, steps, everywhere):
    last = keras_dist.size() - 1
    appended = [StopAt(hook, at, last)] if everywhere or keras_dist.rank() == last else []
    assert steps_of(appended=appended) == steps


def test_a_loss_that_is_no_number_on_one_rank_stops_all():
    weight = np.ones(20, "float32")
    if keras_dist.rank() == keras_dist.size() - 1:
        weight[9] = np.nan  # in the third batch
    assert steps_of(keras.callbacks.TerminateOnNaN(), sample_weight=weight) == 3


def test_what_the_roots_callback_decides_all_do():
    assert steps_of(RootOnly(StopAt("on_train_batch_end", 2, rank=0))) == 2
    root = keras_dist.size() - 1
    assert steps_of(RootOnly(StopAt("on_epoch_end", 1, rank=root), root_rank=root)) == 5


def test_ranks_meet_after_batches_only_where_a_callback_may_stop_there():
    class Quiet(keras.callbacks.ModelCheckpoint):
        """Has the batch hook of Keras, which does not stop."""

    class Watchful(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            """Has an unknown batch hook."""

    nothing = keras.callbacks.LambdaCallback(on_epoch_end=print)
    something = keras.callbacks.LambdaCallback(on_train_batch_end=print)
    for callback, expected in [
        (keras.callbacks.EarlyStopping("loss"), False),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras_dist.callbacks.LearningRateWarmupCallback(0.1), False),
        (Quiet("m.keras"), False),
        (Watchful(), True),
        (nothing, False),
        (something, True),
        (RootOnly(nothing), False),
        (RootOnly(something), True),
        (RootOnly(RootOnly(Watchful())), True),
    ]:
        agrees = keras_dist.callbacks(callback)[-2]
        assert isinstance(agrees, AgreeOnStoppingCallback)
        assert agrees.each_batch is expected, callback


def test_ranks_that_would_meet_at_different_places_are_told_so():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")
    mine = [keras.callbacks.TerminateOnNaN()] if keras_dist.rank() == 0 else []
    with pytest.raises(errors.MismatchError, match="on every rank or on none") as caught:
        steps_of(*mine)
    assert "some on ranks 0 of" in str(caught.value)


def test_evaluation_alone_does_not_meet():
    model = make_model()
    if keras_dist.rank() == 0:
        model.evaluate(*make_data(8), verbose=0, callbacks=[AgreeOnStoppingCallback(True)])
    # A rank that had communicated would be one operation ahead.
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()
