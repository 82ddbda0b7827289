"""The gradients of a bucket as one array of JAX, which a compiled step joins and takes apart."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def reduce_joined(
    fused: Any, gradients: Sequence[Any], call: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Reduces the gradients of a plan, joined to one array for each bucket."""

    def reduce(arrays: Sequence[Any]) -> list[Any]:
        return [result for [result] in fused.reduce_buckets([[array] for array in arrays])]

    flats = [_joined(bucket, gradients) for bucket in fused.buckets]
    reduced: dict[int, Any] = {}
    for bucket, flat in zip(fused.buckets, call(reduce, flats), strict=True):
        for slot in bucket.slots:
            part = flat[slot.offset : slot.offset + slot.count]
            reduced[slot.index] = part.reshape(slot.shape)
    return [reduced[index] for index in range(len(gradients))]


def _joined(bucket: Any, gradients: Sequence[Any]) -> Any:
    """Returns the gradients of a bucket as one array, laid out as in the plan."""
    parts, end = [], 0
    for slot in bucket.slots:
        if slot.offset > end:
            parts.append(jax.numpy.zeros(slot.offset - end, bucket.dtype))
        parts.append(gradients[slot.index].reshape(-1))
        end = slot.offset + slot.count
    return jax.numpy.concatenate(parts) if len(parts) > 1 else parts[0]
