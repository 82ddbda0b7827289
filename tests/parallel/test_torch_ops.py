"""keras_dist.torch: the collectives of Horovod's interface, and their gradients."""

import itertools

import numpy as np
import pytest
import torch

import keras_dist.torch as hvd
from keras_dist import _gpu, errors

pytestmark = pytest.mark.jobs("tensorflow-2", "torch-4", "double-torch-3")

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


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


def total_loss_gradient(loss_of, x):
    """Returns the gradient of the sum of all ranks' losses by this rank's `x`, numerically."""
    found, step = torch.zeros_like(x), 1e-3
    for rank in range(hvd.size()):
        for index in range(x.numel()):
            losses = []
            for sign in (1, -1):
                shifted = x.detach().clone()
                if rank == hvd.rank():
                    shifted.view(-1)[index] += sign * step
                losses.append(float(hvd.allreduce(loss_of(shifted).detach(), op=hvd.Sum)))
            if rank == hvd.rank():
                found.view(-1)[index] = (losses[0] - losses[1]) / (2 * step)
    return found


def test_ranks_and_builds():
    ranks = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    assert ranks == list(range(hvd.size()))
    assert hvd.mpi_built() and hvd.mpi_enabled()
    assert (hvd.nccl_built() == 22304) == _gpu.counts_host_memory()
    assert isinstance(hvd.mpi_threads_supported(), bool) and hvd.is_homogeneous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_of_every_op_and_dtype(dtype):
    for shape in [(), (17,), (17, 3), (5, 3, 2)]:
        x, stack = rank_tensor(shape, dtype), all_tensors(shape, dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), stack.sum(0).to(dtype))
        assert torch.equal(hvd.allreduce(x, op=hvd.Min), stack.amin(0))
        assert torch.equal(hvd.allreduce(x, op=hvd.Max), stack.amax(0))
        assert torch.equal(hvd.allreduce(x, op=hvd.Product), stack.prod(0).to(dtype))
        averaged = hvd.allreduce(x)
        assert averaged.dtype == dtype and averaged.shape == x.shape
        assert torch.equal(averaged, (stack.double().sum(0) / hvd.size()).to(dtype))
        assert torch.equal(x, rank_tensor(shape, dtype))
    if not dtype.is_floating_point:  # the sum overflows, the average does not
        for limit in (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
            assert hvd.allreduce(torch.full((3,), limit, dtype=dtype)).tolist() == [limit] * 3


def test_prescale_and_postscale():
    x, stack = rank_tensor((6,)), all_tensors((6,))
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, stack.sum(0) * 1.5)
    ints = hvd.allreduce(rank_tensor((6,), torch.int32), op=hvd.Sum, prescale_factor=0.5)
    assert torch.equal(ints, (all_tensors((6,)) * 0.5).to(torch.int32).sum(0, dtype=torch.int32))


def test_average_is_deprecated_and_excludes_op():
    x = rank_tensor((3,))
    with pytest.warns(DeprecationWarning, match=r"op=hvd\.Sum"):
        total = hvd.allreduce(x, average=False)
    assert torch.equal(total, all_tensors((3,)).sum(0))
    with pytest.warns(DeprecationWarning, match=r"op=hvd\.Average"):
        hvd.allreduce(x, average=True)
    with pytest.raises(ValueError, match="either op or average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_in_place_forms_write_where_the_tensor_lies():
    total = all_tensors((4, 2)).sum(0)
    x = rank_tensor((4, 2))
    assert hvd.allreduce_(x, op=hvd.Sum) is x and torch.equal(x, total)
    transposed = rank_tensor((4, 2)).t()  # not contiguous
    assert torch.equal(hvd.allreduce_(transposed, op=hvd.Sum), total.t())
    several = [rank_tensor((3,)), rank_tensor((2, 2), torch.bfloat16)]
    hvd.grouped_allreduce_(several, op=hvd.Sum)
    assert torch.equal(several[0], all_tensors((3,)).sum(0))
    assert torch.equal(several[1], all_tensors((2, 2), torch.bfloat16).sum(0))
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


def test_async_forms_return_handles():
    x, stack = rank_tensor((17, 3)), all_tensors((17, 3))
    inplace, grouped = x.clone(), [x.clone(), x.clone()]
    handles = [
        hvd.allreduce_async(x, name="a", op=hvd.Sum),
        hvd.allreduce_async_(inplace, op=hvd.Sum),
        hvd.grouped_allreduce_async([x, x], op=hvd.Max),
        hvd.grouped_allreduce_async_(grouped, op=hvd.Sum),
        hvd.allgather_async(x),
        hvd.grouped_allgather_async([x]),
        hvd.broadcast_async(x, hvd.size() - 1),
        hvd.broadcast_async_(x.clone(), 0),
        hvd.alltoall_async(x, [1] * hvd.size()),
        hvd.reducescatter_async(x, op=hvd.Sum),
        hvd.grouped_reducescatter_async([x], op=hvd.Sum),
    ]
    done = [hvd.synchronize(handle) for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    total = stack.sum(0)
    assert torch.equal(done[0], total)
    assert done[1] is inplace and torch.equal(inplace, total)
    assert torch.equal(done[2][1], stack.amax(0))
    assert torch.equal(grouped[0], total) and torch.equal(grouped[1], total)
    assert torch.equal(done[4], stack.flatten(0, 1)) and torch.equal(done[5][0], done[4])
    assert torch.equal(done[6], stack[-1]) and torch.equal(done[7], stack[0])
    assert done[8][1].tolist() == [1] * hvd.size()
    own = torch.tensor_split(total, hvd.size())[hvd.rank()]
    assert torch.equal(done[9], own) and torch.equal(done[10][0], own)
    with pytest.raises(TypeError, match="a handle"):
        hvd.synchronize(x)


def test_the_error_of_horovod_is_that_of_elastic():
    assert hvd.HorovodInternalError is hvd.elastic.HorovodInternalError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_named_operations_match_in_any_order():
    tensors = {f"layer {number}": rank_tensor((3,)) + number for number in range(8)}
    names = list(np.random.default_rng(hvd.rank()).permutation(list(tensors)))
    handles = {name: hvd.allreduce_async_(tensors[name], name=name, op=hvd.Sum) for name in names}
    gathered = {
        name: hvd.allgather_async(rank_tensor((1,)), name=f"rows of {name}") for name in names
    }
    for number in range(8):
        name = f"layer {number}"
        assert torch.equal(
            hvd.synchronize(handles[name]), all_tensors((3,)).sum(0) + hvd.size() * number
        )
        assert torch.equal(hvd.synchronize(gathered[name]), all_tensors((1,)).flatten())


def test_grouped_forms_of_mixed_dtypes():
    tensors = [
        rank_tensor((3, 2)),
        rank_tensor((4,), torch.int64),
        rank_tensor((2,), torch.float16),
    ]
    for tensor, total in zip(tensors, hvd.grouped_allreduce(tensors, op=hvd.Sum), strict=True):
        assert torch.equal(total, all_tensors(tensor.shape, tensor.dtype).sum(0).to(tensor.dtype))
    assert hvd.grouped_allreduce([]) == []
    joined = hvd.grouped_allgather(tensors)
    assert torch.equal(joined[1], all_tensors((4,), torch.int64).flatten())


def test_sparse_allreduce():
    index = torch.tensor([[hvd.rank(), 5]])
    x = torch.sparse_coo_tensor(index, torch.ones(2, 3) * (hvd.rank() + 1), (8, 3))
    handle = hvd.sparse_allreduce_async(x, name="table", op=hvd.Sum)
    total = handle()  # as in scripts of Horovod
    assert hvd.synchronize(handle) is total
    expected = torch.zeros(8, 3)
    for rank in range(hvd.size()):
        expected[rank] += rank + 1
        expected[5] += rank + 1
    assert total.is_sparse and torch.equal(total.to_dense(), expected)


@pytest.mark.parametrize("shape, dense", [((17, 5), 0), ((4, 3, 6), 1), ((0, 3), 0)], ids=str)
def test_sparse_allreduce_of_several_sparse_dimensions(shape, dense):
    x = all_tensors(shape) * (all_tensors(shape) > 3)
    total = hvd.sparse_allreduce_async(x[hvd.rank()].to_sparse(len(shape) - dense), op=hvd.Sum)()
    assert total.sparse_dim() == len(shape) - dense and total.is_coalesced()
    assert torch.equal(total.to_dense(), x.sum(0))


def test_allgather_of_different_lengths():
    for dtype in (torch.float32, torch.bool, torch.int16, torch.bfloat16):
        x = (torch.ones(hvd.rank() + 1, 2) * (hvd.rank() + 1)).to(dtype)
        rows = [torch.ones(r + 1, 2) * (r + 1) for r in range(hvd.size())]
        assert torch.equal(hvd.allgather(x), torch.cat(rows).to(dtype))
    bools = [torch.arange(2 * hvd.size()) % 3 == rank % 3 for rank in range(hvd.size())]
    assert torch.equal(hvd.broadcast(bools[hvd.rank()], hvd.size() - 1), bools[-1])
    sent = torch.cat([each[2 * hvd.rank() :][:2] for each in bools])
    assert torch.equal(hvd.alltoall(bools[hvd.rank()]), sent)


def test_alltoall_with_unequal_and_zero_splits():
    size, rank = hvd.size(), hvd.rank()
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    rows, received = hvd.alltoall(torch.full((int(splits.sum()), 2), float(rank)), splits)
    assert received.dtype == torch.int32 and received.tolist() == [rank + 1] * size
    assert torch.equal(rows[:, 0], torch.arange(size).repeat_interleave(rank + 1).float())
    equal = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert equal.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    nothing, received = hvd.alltoall(torch.empty(0, 2), torch.zeros(size, dtype=torch.int32))
    assert nothing.shape == (0, 2) and received.tolist() == [0] * size
    first = [3 if rank == 0 else 0] + [0] * (size - 1)  # only rank 0 sends, to itself
    rows, _ = hvd.alltoall(torch.ones(3), first)
    assert len(rows) == (3 if rank == 0 else 0)


def test_reducescatter_of_a_length_not_divisible_by_ranks():
    rows = 2 * hvd.size() + 1
    own = hvd.reducescatter(rank_tensor((rows, 2)), op=hvd.Sum)
    expected = torch.tensor_split(all_tensors((rows, 2)).sum(0), hvd.size())[hvd.rank()]
    assert torch.equal(own, expected)


GRADIENTS = {
    "allreduce sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), 1),
    "allreduce average": (hvd.allreduce, 1),
    "grouped": (lambda x: torch.cat(hvd.grouped_allreduce([x, x**2], op=hvd.Sum)), 1),
    "alltoall": (lambda x: hvd.alltoall(x, [1] + [0] * (hvd.size() - 1))[0], 1),
    "alltoall equal": (hvd.alltoall, 1),
    # Horovod's gradients differ by a factor from those of the sum of all ranks' losses.
    "allgather": (hvd.allgather, lambda: 1 / hvd.size()),
    "grouped allgather": (
        lambda x: torch.cat(hvd.grouped_allgather([x, x**2])),
        lambda: 1 / hvd.size(),
    ),
    "broadcast": (lambda x: hvd.broadcast(x, hvd.size() - 1), lambda: 1 / hvd.size()),
    "reducescatter average": (hvd.reducescatter, hvd.size),
    "reducescatter sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum), hvd.size),
    "grouped reducescatter": (lambda x: torch.cat(hvd.grouped_reducescatter([x, x**2])), hvd.size),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_finite_differences(name):
    operation, factor = GRADIENTS[name]
    x = (torch.arange(hvd.size() * 2, dtype=torch.float64).reshape(-1, 2) + hvd.rank() + 1) / 4

    def loss_of(value):
        result = operation(value)
        weights = torch.arange(result.numel(), dtype=result.dtype) + hvd.rank() + 1
        return (result.flatten() ** 2 * weights).sum()

    leaf = x.clone().requires_grad_()
    loss_of(leaf).backward()
    expected = total_loss_gradient(loss_of, x) * (factor if factor == 1 else factor())
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_horovod():
    size, rank = hvd.size(), hvd.rank()

    def gradient(operation):
        x = torch.ones(size, 2, requires_grad=True)
        operation(x).sum().backward()
        return x.grad

    ones = torch.ones(size, 2)
    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), ones * size)
    assert torch.equal(gradient(hvd.allreduce), ones)
    assert torch.equal(gradient(hvd.allgather), ones)
    assert torch.equal(gradient(lambda x: hvd.broadcast(x, 0)), ones * (rank == 0))
    infinite = gradient(lambda x: hvd.broadcast(x, 0) * torch.inf)
    assert torch.equal(infinite, torch.where(torch.tensor(rank == 0), torch.inf, 0 * ones))
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), ones * size)
    assert torch.equal(gradient(hvd.alltoall), ones)
    with pytest.raises(errors.ArgumentError, match="Average or Sum in an allreduce"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max))


@pytest.mark.parametrize("with_splits", [False, True])
def test_gradients_with_unequal_numbers_of_rows(with_splits):
    """Each row gets the gradient of its place at the receiver."""
    size, rank = hvd.size(), hvd.rank()
    counts = np.array([[2 * source + 1] * size for source in range(size)])
    if with_splits:
        counts += np.arange(size)
    unsent = 1 if with_splits else 0  # after the last row of the splits

    def gradient(function, rows):
        given = torch.zeros(rows, 1, requires_grad=True)
        function(given)[:, 0].sum().backward()
        return given.grad[:, 0].numpy()

    def places(rows, first=1.0):
        return rows * torch.arange(first, first + len(rows))[:, None]

    def exchanged(x):
        result = hvd.alltoall(x, counts[rank].tolist() if with_splits else None)
        return places(result[0] if with_splits else result, 100.0 * rank + 1)

    found = gradient(exchanged, counts[rank].sum() + unsent)
    expected = [
        100 * receiver + counts[:rank, receiver].sum() + 1 + i
        for receiver in range(size)
        for i in range(counts[rank, receiver])
    ]
    assert found.tolist() == [*expected, *[0] * unsent]
    start = rank * (rank + 1) // 2
    found = gradient(lambda x: places(hvd.allgather(x)), rank + 1)
    assert found.tolist() == [start + 1 + i for i in range(rank + 1)]
    own = np.array_split(np.arange(2 * size + 1), size)[rank]
    found = gradient(lambda x: places(hvd.reducescatter(x, op=hvd.Sum), own[0] + 1.0), 2 * size + 1)
    assert found.tolist() == [size * (1 + i) for i in range(2 * size + 1)]
    found = gradient(lambda x: hvd.broadcast(x, size - 1) * (rank + 1), 3)
    assert found.tolist() == [(size + 1) / 2 if rank == size - 1 else 0] * 3


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_summed(dtype):
    given = torch.tensor([1.0, 2.0]).to(dtype)
    found = hvd.allreduce(given, op=hvd.Sum)
    assert found.dtype == dtype and found.float().tolist() == [1.0 * hvd.size(), 2.0 * hvd.size()]
    assert hvd.allgather(given).float().tolist() == [1.0, 2.0] * hvd.size()
    hvd.broadcast_(given, 0)
    assert given.float().tolist() == [1.0, 2.0]


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


MISMATCHES = {  # functions of whether the rank is the odd one
    "shape": lambda odd: hvd.allreduce(torch.ones(17 + odd)),
    "dtype": lambda odd: hvd.allreduce(torch.ones(3, dtype=DTYPES[odd])),
    "op": lambda odd: hvd.allreduce(torch.ones(3), op=[hvd.Sum, hvd.Max][odd]),
    "root": lambda odd: hvd.broadcast(torch.ones(3), int(odd)),
    "shape of broadcast": lambda odd: hvd.broadcast(torch.ones(3 + odd), 0),
    "dtype of broadcast": lambda odd: hvd.broadcast(torch.ones(3, dtype=DTYPES[odd]), 0),
    "rows": lambda odd: hvd.allgather(torch.ones(3, 2 + odd)),
    "dtype of alltoall": lambda odd: hvd.alltoall(torch.ones(hvd.size(), dtype=DTYPES[odd])),
    "columns of alltoall": lambda odd: hvd.alltoall(torch.ones(hvd.size(), 1 + odd)),
    "shape of reducescatter": lambda odd: hvd.reducescatter(torch.ones(8 + odd)),
    "kind": lambda odd: (hvd.allgather if odd else hvd.allreduce)(torch.ones(3)),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatches_are_errors_on_every_rank_and_the_job_continues(what):
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(errors.MismatchError, match=r"rank \d of"):
        MISMATCHES[what](hvd.rank() == 1)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_invalid_arguments_are_errors():
    for wrong in (
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.broadcast(torch.ones(1), hvd.size()),
        lambda: hvd.alltoall(torch.ones(3), [9] * hvd.size()),
        lambda: hvd.allreduce(torch.ones(1), op="mean"),
    ):
        with pytest.raises(ValueError, match=r"\[rank"):
            wrong()


@pytest.mark.skipif(hvd.size() == 1, reason="a set of one rank is all ranks")
def test_process_sets():
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    x = torch.ones(2, requires_grad=True) * (hvd.rank() + 1)
    if even.included():
        count = len(even.ranks)
        assert (
            hvd.allreduce(x, op=hvd.Sum, process_set=even).tolist()
            == [sum(r + 1 for r in even.ranks)] * 2
        )
        assert len(hvd.allgather(x, process_set=even)) == 2 * count
        last = even.ranks[-1]
        assert hvd.broadcast(x, last, process_set=even).tolist() == [last + 1] * 2
        hvd.barrier(process_set=even)
    else:
        with pytest.raises(ValueError, match="to be in the process set"):
            hvd.allreduce(x, process_set=even)
    assert hvd.remove_process_set(even)


def test_compression():
    for compression, narrow in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
        (hvd.Compression.none, None),
    ):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bool):
            x = torch.tensor([0, 1, 1]).to(dtype)
            small, ctx = compression.compress(x)
            assert small.dtype == (narrow if narrow and dtype.is_floating_point else dtype)
            assert compression.decompress(small, ctx).dtype == dtype
        total = hvd.allreduce(rank_tensor((5,)), op=hvd.Sum, compression=compression)
        assert torch.equal(total, all_tensors((5,)).sum(0))

    class Halved(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor.half() / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx) * 2

    total = hvd.allreduce(rank_tensor((5,)), op=hvd.Sum, compression=Halved)
    assert total.dtype == torch.float32 and torch.equal(total, all_tensors((5,)).sum(0))


def test_objects():
    own = {"rank": hvd.rank(), "tensor": torch.ones(2) * hvd.rank()}
    last = hvd.broadcast_object(own, root_rank=hvd.size() - 1)
    assert last["rank"] == hvd.size() - 1 and last["tensor"].tolist() == [hvd.size() - 1] * 2
    assert [each["rank"] for each in hvd.allgather_object(own)] == list(range(hvd.size()))


def test_join_averages_over_ranks_with_data():
    for step in range(hvd.size() - hvd.rank()):
        here = [rank for rank in range(hvd.size()) if step < hvd.size() - rank]
        averaged = hvd.allreduce(torch.ones(3) * hvd.rank())
        assert averaged.tolist() == [pytest.approx(np.mean(here))] * 3
    assert hvd.join() == 0  # rank 0 had most data


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
