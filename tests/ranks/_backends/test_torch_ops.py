"""keras_dist.torch: what other frameworks have not. See `test_faces` for its operations."""

import itertools

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import keras_dist.torch as hvd
from keras_dist import _gpu, errors

pytestmark = pytest.mark.jobs("tensorflow-2", "double-torch-3")


@pytest.fixture(autouse=True, scope="module")
def started():
    hvd.init()


def rank_tensor(shape, dtype=torch.float32, rank=None):
    """Returns a tensor of small integers, different on each rank."""
    rank = hvd.rank() if rank is None else rank
    count = int(np.prod(shape))
    return ((torch.arange(count) * (rank + 2) + rank) % 5 + 1).reshape(shape).to(dtype)


def all_tensors(shape, dtype=torch.float32):
    return torch.stack([rank_tensor(shape, dtype, rank) for rank in range(hvd.size())])


def test_ranks_and_builds():
    ranks = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    assert ranks == list(range(hvd.size()))
    assert hvd.mpi_built() and hvd.mpi_enabled()
    assert (hvd.nccl_built() == 22304) == _gpu.counts_host_memory()
    assert isinstance(hvd.mpi_threads_supported(), bool) and hvd.is_homogeneous()
    assert hvd.HorovodInternalError is hvd.elastic.HorovodInternalError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    with pytest.raises(TypeError, match="a handle"):
        hvd.synchronize({})


def test_in_place_forms_write_where_the_tensor_lies():
    transposed = rank_tensor((4, 2)).t()  # not contiguous
    total = all_tensors((4, 2)).sum(0).t()
    assert torch.equal(hvd.allreduce_(transposed, op=hvd.Sum), total)
    several = [rank_tensor((4, 2)).t(), rank_tensor((2, 2), torch.bfloat16)]
    hvd.grouped_allreduce_(several, op=hvd.Sum)
    assert torch.equal(several[0], total)
    for root in range(hvd.size()):
        for tensor in (
            rank_tensor((5,)),
            rank_tensor((5,), torch.bfloat16),
            rank_tensor((4, 2)).t(),
            rank_tensor(()),
        ):
            shape = tensor.t().shape if tensor.ndim == 2 else tensor.shape
            expected = rank_tensor(shape, tensor.dtype, root)
            version = tensor._version
            assert hvd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, expected.t() if tensor.ndim == 2 else expected)
            assert tensor._version > version
    parameter = torch.nn.Parameter(rank_tensor((3,)))
    hvd.broadcast_(parameter, 0)
    assert torch.equal(parameter.detach(), rank_tensor((3,), rank=0))


@pytest.mark.parametrize("shape, dense", [((17, 5), 0), ((4, 3, 6), 1), ((0, 3), 0)], ids=str)
def test_sparse_allreduce_of_several_sparse_dimensions(shape, dense):
    x = all_tensors(shape) * (all_tensors(shape) > 3)
    total = hvd.sparse_allreduce_async(x[hvd.rank()].to_sparse(len(shape) - dense), op=hvd.Sum)()
    assert total.sparse_dim() == len(shape) - dense and total.is_coalesced()
    assert torch.equal(total.to_dense(), x.sum(0))


@pytest.mark.parametrize("backed", ["contiguous", "strided"])
def test_conjugate_and_negative_views(backed):
    size = hvd.size()
    z = torch.tensor([1 + 2j, 5, 3 - 1j, 5])
    z = z[::2] if backed == "strided" else z[::2].contiguous()
    right = torch.tensor([1 - 2j, 3 + 1j])
    view = z.conj()
    assert torch.equal(hvd.allreduce(view, op=hvd.Sum), right * size)
    assert torch.equal(hvd.allreduce(view.imag, op=hvd.Sum), right.imag * size)
    assert torch.equal(hvd.grouped_allreduce([view, view.imag])[1], right.imag)
    assert torch.equal(hvd.allgather(view), right.repeat(size))
    assert torch.equal(hvd.broadcast(view, 0), right)
    assert torch.equal(hvd.alltoall(view.imag.repeat(size)), right.imag.repeat(size))
    copies = [z.clone().conj(), z.clone().conj().imag]
    hvd.allreduce_(copies[0], op=hvd.Sum)
    assert torch.equal(copies[0], right * size)
    hvd.broadcast_(copies[1], 0)
    assert torch.equal(copies[1], right.imag)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="meta"),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.ones(2).to(torch.complex32),
    ],
)
def test_tensors_without_an_array_are_refused_on_all_ranks(make):
    odd = hvd.rank() == hvd.size() - 1
    with pytest.raises(errors.ArgumentTypeError, match="dense tensor"):
        hvd.allreduce(make() if odd else torch.ones(2))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def test_torch_func_takes_gradients_through_operations():
    def loss(tensor):
        reduced = hvd.allreduce(tensor * (hvd.rank() + 1), op=hvd.Sum)
        return (hvd.allgather(reduced) ** 3).sum()

    tensor = rank_tensor((2, 2), torch.float64)
    expected = tensor.clone().requires_grad_()
    loss(expected).backward()
    torch.testing.assert_close(torch.func.grad(loss)(tensor), expected.grad)


def test_sampler_resumes_within_an_epoch():
    data = list(range(6 * hvd.size() + 1))
    sampler = hvd.ElasticSampler(data, shuffle=True, seed=3)
    sampler.set_epoch(2)
    order = list(sampler)
    assert len(order) == len(sampler) == 7
    assert set(itertools.chain(*hvd.allgather_object(order))) == set(data)
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state = sampler.state_dict()
    assert state["epoch"] == 2 and state["processed_indices"] == set(order[:4])
    known = hvd.allgather_object(state["processed_indices"])
    resumed = hvd.ElasticSampler(data, shuffle=True, seed=3)
    resumed.load_state_dict({"epoch": 2, "processed_indices": set().union(*known)})
    left = hvd.allgather_object(list(resumed))
    assert set(itertools.chain(*left)) == set(data) - set().union(*known)
    assert len({len(each) for each in left}) == 1
    sampler.set_epoch(3)
    assert sampler.state_dict()["processed_indices"] == set() and list(sampler) != order
    assert (
        list(hvd.ElasticSampler(data, shuffle=False))
        == (data * 2)[hvd.rank() : 7 * hvd.size() : hvd.size()]
    )


def test_values_that_are_no_tensors_are_refused_on_all_ranks():
    odd, one = hvd.rank() == hvd.size() - 1, torch.ones(1)
    for value in None, "text", [1.0], np.ones(1), 1.0:
        for call in hvd.allreduce, hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0):
            with pytest.raises(errors.ArgumentTypeError, match="tensors or arrays in ") as caught:
                call(value if odd else one)
            assert f"Received: {type(value).__name__} (" in str(caught.value) or value == [1.0]
    with pytest.raises(errors.ArgumentTypeError, match=r"Received: Tensor, NoneType \("):
        hvd.grouped_allreduce([one, None if odd else one])
    assert hvd.allreduce(one, op=hvd.Sum) == hvd.size()


def test_tensors_with_a_forward_mode_derivative_are_refused_on_all_ranks():
    norm = hvd.SyncBatchNorm(3)
    calls = [
        hvd.allreduce,
        lambda x: hvd.allreduce(x * x.new_ones(3, requires_grad=True)),
        hvd.allreduce_,
        lambda x: hvd.grouped_allreduce([x, x]),
        lambda x: hvd.grouped_allreduce_([x]),
        lambda x: hvd.synchronize(hvd.allreduce_async(x)),
        hvd.allgather,
        lambda x: hvd.alltoall(x.repeat(hvd.size())),
        hvd.reducescatter,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.broadcast_(x, 0),
        lambda x: norm(x * x.new_ones(2, 1)),
    ]
    for call in calls:
        with forward_ad.dual_level(), pytest.raises(errors.ArgumentError, match="tangent"):
            call(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
    with pytest.raises(errors.ArgumentError, match="tangent"):
        torch.func.jvp(hvd.allreduce, (torch.ones(3),), (torch.ones(3),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert torch.equal(hvd.allreduce(dual.detach()), torch.ones(3))


def test_tensors_of_inference_mode_are_written_to_in_and_outside_of_it():
    size, everyone = hvd.size(), torch.arange(hvd.size()).sum()

    def fill():
        return [torch.full((3, 2), float(hvd.rank()))[part] for part in (0, (..., 1), 1)]

    with torch.inference_mode():
        inside, outside, queued = fill(), fill(), fill()
        handles = [
            hvd.allreduce_async_(queued[0], op=hvd.Sum),
            hvd.allreduce_async_(queued[1], op=hvd.Sum),
        ]
        handles.append(hvd.broadcast_async_(queued[2], size - 1))
        hvd.grouped_allreduce_([inside[0]], op=hvd.Sum)
        hvd.allreduce_(inside[1], op=hvd.Sum)
        hvd.broadcast_(inside[2], size - 1)
    hvd.grouped_allreduce_([outside[0]], op=hvd.Sum)
    hvd.allreduce_(outside[1], op=hvd.Sum)
    hvd.broadcast_(outside[2], size - 1)
    for handle in handles:
        hvd.synchronize(handle)
    for *summed, sent in inside, outside, queued:
        assert all((each == everyone).all() for each in summed) and (sent == size - 1).all()
