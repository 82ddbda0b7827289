"""The plans by which gradients are reduced: names, shapes and terms to buckets.

Knows no framework and no optimizer.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, config
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.ops.reduction_options import ReductionOptions

__all__ = ["SAME_MODEL", "GradientPlans", "overlaps"]

# The last gradients of a model are ready first: reducing begins before the rest has come.
FIRST_NBYTES = 2**20
SAME_MODEL = "Build the same model, with the same optimizer, on every rank."


class GradientPlans:
    """The plans of one optimizer's gradients; each is made once.

    Args:
        terms: how they are reduced.
    """

    def __init__(self, terms: ReductionOptions):
        self._terms = terms
        self._plans: dict[Any, _engine.FusedAllreduce] = {}

    def __call__(
        self,
        comm: _engine.Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        groups: Sequence[Sequence[int]],
    ) -> _engine.FusedAllreduce:
        """Returns the plan of some gradients.

        Collective at the first call for them, as `bucket_nbytes` is.

        Args:
            comm: the ranks.
            names: what the gradients are called in messages.
            specs: shape and dtype of each.
            groups: positions of those that travel together.
        """
        key = (comm, tuple(names), tuple(specs), tuple(map(tuple, groups)))
        if key not in self._plans:
            # Ranks that have been left since give their shared memory back.
            self._plans = {known: plan for known, plan in self._plans.items() if known[0] is comm}
            nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
            op, prescale, postscale = self._terms.scaling(comm.size)
            what = "the reduction of gradients"
            gradients = _engine.CollectiveSignature(
                what, _engine.entries_of(names, specs), op.value, remedy=SAME_MODEL
            )
            self._plans[key] = _engine.FusedAllreduce(
                comm,
                names,
                specs,
                op,
                bucket_nbytes(comm, gradients, nbytes),
                first_nbytes=FIRST_NBYTES,
                operation=what,
                remedy=SAME_MODEL,
                lend=True,
                prescale=prescale,
                postscale=postscale,
                compression=self._terms.compression,
                groups=groups,
                overlaps=overlaps(comm),
                updates=True,
                divides=op is not self._terms.op,
                ranks=self._terms.ranks,
            )
        return self._plans[key]


def overlaps(comm: _engine.Communicator) -> bool:
    """Tells whether gradients should be reduced while others are computed.

    Where it is left open: when a rank waits for a network meanwhile, or has a core to spare. On
    one core the two only take turns, and it costs a few hundredths of the speed.

    Args:
        comm: the ranks; the answer is equal on all.
    """
    chosen = config.settings().overlap
    if chosen == "auto":
        return not comm.is_one_node or comm.job.fewest_cores > 1
    return chosen == "on"
