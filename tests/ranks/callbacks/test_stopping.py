"""All ranks stop training after the same step, whichever rank stops."""

import keras
import numpy as np
import pytest
from small_training import agreed, make_data, make_model

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import AgreeOnStoppingCallback, RootOnly

pytestmark = pytest.mark.jobs("torch-2")
on_all_backends = pytest.mark.jobs("tensorflow-2", "jax-2")


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
        pytest.param("on_train_batch_end", 7, 7, marks=on_all_backends),
        ("on_epoch_end", 2, 10),
    ],
)
def test_a_stop_on_one_rank_stops_all_after_the_same_step(hook, at, steps):
    assert steps_of(StopAt(hook, at, rank=keras_dist.size() - 1)) == steps


@pytest.mark.parametrize(
    ("hook", "at", "steps", "everywhere"),
    [("on_train_batch_end", 7, 7, False), ("on_epoch_end", 2, 10, True)],
)
def test_a_callback_behind_the_list_stops_all_after_the_same_step(hook, at, steps, everywhere):
    last = keras_dist.size() - 1
    appended = [StopAt(hook, at, last)] if everywhere or keras_dist.rank() == last else []
    assert steps_of(appended=appended) == steps


def test_a_fit_forgets_the_stop_of_one_that_has_raised_within_a_round():
    optimizer = keras.optimizers.SGD(0.1)
    local_steps = keras_dist.LocalSteps(4)
    model = make_model(keras_dist.DistributedOptimizer(optimizer, local_steps=local_steps))
    raises = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (batch < 1))
    callbacks = keras_dist.callbacks(StopAt("on_train_batch_end", 1, rank=0))
    data = make_data(20, seed=keras_dist.rank())
    options = {"batch_size": 4, "verbose": 0}
    with pytest.raises(ZeroDivisionError):
        model.fit(*data, callbacks=[*callbacks, raises], **options)
    steps = Steps()
    model.fit(*data, epochs=2, callbacks=[steps, *callbacks], **options)
    assert steps.count == 10


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
        (keras_dist.callbacks.Throughput(), False),
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


# --- Exceptions that a script catches


class Pruned(Exception):
    """As a library for searches raises it to end a trial."""

    def __init__(self, step):
        super().__init__(step)
        self.step = step


class Prune(keras.callbacks.Callback):
    """Raises at the `at`th call of one hook on the last rank."""

    def __init__(self, hook, at):
        super().__init__()
        self.calls, self.at = 0, at
        setattr(self, hook, self._hook)

    @keras_dist.raise_on_all()
    def _hook(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at and keras_dist.rank() == keras_dist.size() - 1:
            raise Pruned(self.calls)


@pytest.mark.long
@pytest.mark.parity("an exception that a rank raises in a callback is raised on all, which go on")
@pytest.mark.parametrize(
    "hook", ["on_train_begin", pytest.param("on_train_batch_end", marks=on_all_backends)]
)
def test_an_exception_of_one_rank_is_raised_on_all(hook):
    at = 1 if hook == "on_train_begin" else 2
    prune = Prune(hook, at)
    for _ in range(2):  # the next trial is in step
        prune.calls = 0
        with pytest.raises(Pruned) as caught:
            steps_of(prune)
        assert (caught.value.step, prune.calls) == (at, at)
    assert steps_of() == 15


def test_an_exception_in_a_loop_of_the_users_own():
    ranks, last = keras_dist.size(), keras_dist.size() - 1
    sums = []
    for trial in range(3):
        try:
            for step in range(4):
                with keras_dist.raise_on_all():
                    sums.append(float(keras_dist.allreduce(1.0, op=keras_dist.Sum)))
                    if (trial, step, keras_dist.rank()) == (1, 2, last):
                        raise Pruned(step)
        except Pruned as pruned:
            assert pruned.step == 2
    assert sums == [float(ranks)] * 11


def test_the_exception_of_the_first_rank_is_raised_where_several_raise():
    kinds = [KeyError, OSError]
    with pytest.raises(KeyError, match="0"), keras_dist.raise_on_all():
        raise kinds[keras_dist.rank() % 2](keras_dist.rank())
    with pytest.raises(KeyboardInterrupt), keras_dist.raise_on_all():
        raise KeyboardInterrupt
    assert keras_dist.allgather_object(1) == [1] * keras_dist.size()


def test_an_exception_that_cannot_be_sent_is_an_error_on_all_ranks():
    class Local(Exception):
        """Of a class that other processes do not know."""

    class Demanding(Exception):
        def __init__(self, one, other):
            super().__init__(one)

    for kind in (lambda: Local("why"), lambda: Demanding("why", 2)):
        expected = pytest.raises(errors.RankError, match=r"\[rank 0 of .*why")
        with expected as caught, keras_dist.raise_on_all():
            if keras_dist.rank() == 0:
                raise kind()
        assert caught.value.rank == 0
        assert agreed(str(caught.value))


def test_an_error_that_all_ranks_have_passes():
    with pytest.raises(errors.ArgumentError), keras_dist.raise_on_all():
        keras_dist.allreduce(1.0, op="unknown")
    if keras_dist.size() > 1:
        named = pytest.raises(errors.MismatchError, match=r"raise_on_all\.$")
        with named, keras_dist.raise_on_all():
            keras_dist.allreduce(1.0) if keras_dist.rank() else keras_dist.barrier()
        some = keras_dist.add_process_set(list(range(1, keras_dist.size())))
        if keras_dist.rank() > 0:
            with pytest.raises(Pruned), keras_dist.raise_on_all(some):
                if keras_dist.rank() == keras_dist.size() - 1:
                    raise Pruned(1)
        keras_dist.remove_process_set(some)
    assert keras_dist.allgather_object(1) == [1] * keras_dist.size()
