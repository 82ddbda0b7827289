"""Plans of gradient reductions: the assignment of gradients to buckets."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, config
from keras_dist.ops.reduction_options import ReductionOptions

USUAL_BUCKET_NBYTES = 25 * 2**20
ONE_BUCKET_NBYTES = 2**62  # for all gradients
# On the host, with overlap, what is left when backpropagation ends is about a bucket.
OVERLAPPED_BUCKET_NBYTES = 4 * 2**20
# The first bucket is small: its reduction starts when the first gradients are ready.
FIRST_NBYTES = 2**20
# A smaller table is faster reduced whole, with others.
LEAST_TABLE_NBYTES = 2**20
SAME_MODEL = "Build the same model, with the same optimizer, on every rank."


class GradientPlans:
    """A cache of the plans for the gradients of an optimizer."""

    def __init__(self, options: ReductionOptions):
        self._options = options
        self.feedback = _engine.Feedback()
        self._plans: dict[Any, _engine.FusedAllreduce] = {}

    def __call__(
        self,
        comm: _engine.Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        groups: Sequence[Sequence[int]],
        keys: Sequence[Hashable],
        brought: _engine.GradientSet | None = None,
        at_once: bool = False,
        knows_rows: bool = False,
        embeddings: Sequence[int] = (),
    ) -> _engine.FusedAllreduce:
        """Returns the plan for some gradients, of which those of `embeddings` may have few rows.

        A key tells a variable apart on this rank; that of an array that is no gradient is `None`.
        Ranks that differ in what is `brought` may adapt.
        """
        compression = self._options.gradient_compression
        of = None if compression is None else tuple(keys)
        grouped = tuple(map(tuple, groups))
        key = (comm, tuple(names), tuple(specs), grouped, brought, of, knows_rows)
        if key not in self._plans:
            # Plans for another communicator free their shared memory; graphs may still use theirs.
            olds = {old: plan for old, plan in self._plans.items() if old[0] is not comm}
            for old, plan in olds.items():
                plan.release()
                if not plan.is_in_graph:
                    del self._plans[old]
            op, prescale, postscale = self._options.scaling(comm.size)
            what = "the reduction of gradients"
            if self._options.shard_state:
                what += " for a sharded optimizer"
            if compression is not None:  # compared by the ranks
                what += f" by {compression.name}"
            options = _engine.OpOptions(
                op,
                prescale=prescale,
                postscale=postscale,
                compression=self._options.wire,
                gradients=brought,
            )
            by_nccl = _engine.path_of(comm).uses_nccl
            # To look for rows takes as long as to reduce in the memory of one host.
            finds = not comm.is_one_node
            by_rows = (knows_rows or finds) and not by_nccl
            overlapping = overlaps(comm) and compression is None and not (at_once and by_nccl)
            how = _engine.BucketOptions(
                bucket_nbytes(overlapping, by_nccl),
                first_nbytes=FIRST_NBYTES if overlapping or not by_nccl else None,
                groups=groups,
                tables=self._tables(op, specs, groups, embeddings) if by_rows else (),
                finds_rows=finds,
                operation=what,
                remedy=SAME_MODEL,
                lend=True,
                overlaps=overlapping,
                counts_updates=True,
                divides=op is not self._options.op,
                ranks=self._options.ranks,
            )
            if compression is None:
                self._plans[key] = _engine.FusedAllreduce(comm, names, specs, options, how)
            else:
                self._plans[key] = _engine.CompressedAllreduce(
                    comm, names, specs, options, how, compression, keys, self.feedback
                )
        return self._plans[key]

    def _tables(
        self,
        op: _engine.ReduceOp,
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        groups: Sequence[Sequence[int]],
        embeddings: Sequence[int],
    ) -> list[int]:
        """Returns the gradients that are reduced by their rows, where these are few."""
        adds = op in (_engine.ReduceOp.SUM, _engine.ReduceOp.AVERAGE)
        if not adds or self._options.gradient_compression is not None:
            return []
        grouped = {index for group in groups for index in group}
        return [
            index
            for index in embeddings
            if index not in grouped
            and math.prod(specs[index][0]) * specs[index][1].itemsize >= LEAST_TABLE_NBYTES
        ]


def bucket_nbytes(overlaps: bool = False, by_nccl: bool = False) -> int:
    """Returns the size in bytes at which a bucket is closed."""
    if chosen := config.settings().bucket_nbytes:
        return chosen
    if by_nccl:
        return USUAL_BUCKET_NBYTES if overlaps else ONE_BUCKET_NBYTES
    return OVERLAPPED_BUCKET_NBYTES if overlaps else USUAL_BUCKET_NBYTES


def overlaps(comm: _engine.Communicator) -> bool:
    """Returns whether reductions overlap with backpropagation."""
    chosen = config.settings().overlap
    if chosen == "auto":
        # On one core, reduction and computation compete, which costs a few per cent of the speed.
        return not comm.is_one_node or comm.job.fewest_cores > 1
    return chosen == "on"
