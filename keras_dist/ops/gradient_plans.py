"""Plans of gradient reductions: names, shapes and options of gradients to buckets.

Independent of framework and optimizer.
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
        options: how they are reduced.
    """

    def __init__(self, options: ReductionOptions):
        self._options = options
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
            op, prescale, postscale = self._options.scaling(comm.size)
            what = "the reduction of gradients"
            gradients = _engine.CollectiveSignature(
                what, _engine.entries_of(names, specs), op.value, remedy=SAME_MODEL
            )
            options = _engine.OpOptions(
                op, prescale=prescale, postscale=postscale, compression=self._options.compression
            )
            plan = _engine.PlanOptions(
                bucket_nbytes(comm, gradients, nbytes),
                first_nbytes=FIRST_NBYTES,
                groups=groups,
                operation=what,
                remedy=SAME_MODEL,
                lend=True,
                overlaps=overlaps(comm),
                counts_updates=True,
                divides=op is not self._options.op,
                ranks=self._options.ranks,
            )
            self._plans[key] = _engine.FusedAllreduce(comm, names, specs, options, plan)
        return self._plans[key]


def overlaps(comm: _engine.Communicator) -> bool:
    """Returns whether gradients are reduced while others are computed.

    `auto` overlaps where ranks wait for a network or have a core to spare. On a single core the
    reduction and the computation compete, which costs a few per cent of the speed.

    Args:
        comm: communicator of the ranks; the answer is equal on all of them.
    """
    chosen = config.settings().overlap
    if chosen == "auto":
        return not comm.is_one_node or comm.job.fewest_cores > 1
    return chosen == "on"
