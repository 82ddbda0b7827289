"""The train step of the GAN on JAX, where a step is given all state and returns it."""

from itertools import chain

import jax
import keras


class Values:
    """What the variables of a model hold in a step, by variable."""

    def __init__(self, variables, values):
        self._pairs = {id(one): (one, value) for one, value in zip(variables, values, strict=True)}

    def of(self, variables):
        return [self._pairs[id(one)][1] for one in variables]

    def put(self, variables, values):
        self._pairs.update(Values(variables, values)._pairs)

    def scope(self, variables, values):
        """A scope in which the variables hold these values, and all others what they hold."""
        return keras.StatelessScope([*self._pairs.values(), *zip(variables, values, strict=True)])


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
    held = Values(chain.from_iterable(kinds), chain.from_iterable(state))
    logs = {}
    for metric, optimizer, network, loss_of in gan.turns(images):
        loss = _descend(held, gan.non_trainable_variables, optimizer, network, loss_of)
        after = metric.stateless_update_state(held.of(metric.variables), loss)
        held.put(metric.variables, after)
        logs[metric.name] = metric.stateless_result(after)
    return logs, tuple(held.of(variables) for variables in kinds)


def _descend(held, others, optimizer, network, loss_of):
    """Makes one step of an optimizer down a loss of a network; returns the loss."""
    weights = network.trainable_variables

    def run(values):
        with held.scope(weights, values) as scope:
            loss = loss_of()
        # Seeds of noise and dropout go on.
        return loss, [scope.get_current_value(one) for one in others]

    (loss, after), gradients = jax.value_and_grad(run, has_aux=True)(held.of(weights))
    held.put(others, after)
    applied = optimizer.stateless_apply(held.of(optimizer.variables), gradients, held.of(weights))
    held.put(weights, applied[0])
    held.put(optimizer.variables, applied[1])
    return loss
