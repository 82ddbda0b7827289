"""A fit that is interrupted, and the state of a model to the bit."""

import keras

from keras_dist.training import model_state
from keras_dist.training.session_callback import SessionCallback


class Interrupted(Exception):
    """Ends the training in these tests."""


class Interrupt(SessionCallback):
    """Ends the training at the start of an epoch or after a step, after its backup."""

    def __init__(self, epoch, batch=None):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if self.at == (epoch, None):
            raise Interrupted

    def on_train_batch_end(self, batch, logs=None):
        if self.at == (self.epoch, batch):
            self.session.after_hook(self.interrupt)

    def interrupt(self):
        raise Interrupted


def everything_of(model):
    return [value_of(variable) for variable in model_state.state(model)]


def value_of(variable):
    return keras.ops.convert_to_numpy(variable).tobytes()
