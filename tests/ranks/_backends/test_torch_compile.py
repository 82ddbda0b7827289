"""keras_dist.torch in functions that `torch.compile` compiles, whose import takes seconds."""

import pytest
import torch
from test_torch_ops import all_tensors, rank_tensor

import keras_dist.torch as hvd
from keras_dist._backends.torch import backend

pytestmark = pytest.mark.jobs("tensorflow-2")


def of_each_kind(tensor):
    """Returns the results of operations, blocking, queued and in place."""
    copies = [2 * tensor, tensor.clone()]
    hvd.allreduce_(copies[0], op=hvd.Sum)
    hvd.broadcast_(copies[1], 0)
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="queued")
    own = torch.cat([tensor] * hvd.size())
    rows, counts = hvd.alltoall(own, splits=torch.tensor([len(tensor)] * hvd.size()))
    return (
        hvd.allreduce(tensor * hvd.size() + 1, op=hvd.Sum) / (1 + hvd.rank()),
        hvd.allgather(tensor),
        hvd.reducescatter(own, op=hvd.Sum),
        *hvd.grouped_allreduce([tensor, tensor[:1]]),
        hvd.broadcast(tensor, hvd.size() - 1),
        hvd.synchronize(handle),
        torch.tensor(hvd.broadcast_object(3, 0)),
        rows,
        counts,
        *copies,
    )


def test_torch_compile_calls_operations_that_it_cannot_trace():
    compiled = torch.compile(of_each_kind)
    for length in (2, 3):
        tensor = rank_tensor((length,))
        for found, expected in zip(compiled(tensor), of_each_kind(tensor), strict=True):
            torch.testing.assert_close(found, expected)
    tensor = rank_tensor((3,)).requires_grad_()
    squares = torch.compile(lambda given: (hvd.allreduce(given * 2, op=hvd.Sum) ** 2).sum())
    squares(tensor).backward()
    expected = 8 * hvd.size() * all_tensors((3,)).sum(0)
    torch.testing.assert_close(tensor.grad, expected)


def test_the_reduction_is_not_traced():
    # torch.compile reads this attribute.
    assert backend.reduce_gradients._torchdynamo_disable
