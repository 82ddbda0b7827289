"""The train step of the GAN on JAX, where a step is given all state and returns it."""

from itertools import chain

import jax
import keras


def train_step(gan, state, images):
    """Makes one step of each optimizer.

    Args:
        gan: the `Gan`.
        state: values of its trainable and other variables, of its optimizer's and its metrics'.
        images: the real ones.

    Returns:
        The logs, and the state after the step.
    """
    kinds = [
        gan.trainable_variables,
        gan.non_trainable_variables,
        gan.optimizer.variables,
        gan.metrics_variables,
    ]
    given = list(zip(chain(*kinds), chain(*state), strict=True))
    with keras.StatelessScope(given) as scope:
        for metric, optimizer, network, loss_of in gan.turns(images):
            metric.update_state(_descend(gan, optimizer, network, loss_of))
        logs = {metric.name: metric.result() for metric in gan.metrics}
    return logs, tuple([scope.get_current_value(one) for one in kind] for kind in kinds)


def _descend(gan, optimizer, network, loss_of):
    """Makes one step of an optimizer down a loss of a network; returns the loss."""
    weights, others = network.trainable_variables, gan.non_trainable_variables
    held = [(one, one.value) for one in [*gan.trainable_variables, *others]]

    def run(values):
        with keras.StatelessScope([*held, *zip(weights, values, strict=True)]) as scope:
            loss = loss_of()
        return loss, [scope.get_current_value(one) for one in others]

    before = [one.value for one in weights]
    (loss, after), gradients = jax.value_and_grad(run, has_aux=True)(before)
    # Seeds of noise and dropout go on.
    _assign(others, after)
    state = [one.value for one in optimizer.variables]
    stepped, state = optimizer.stateless_apply(state, gradients, before)
    _assign([*weights, *optimizer.variables], [*stepped, *state])
    return loss


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
