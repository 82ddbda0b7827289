"""`keras_dist.torch` for the tests of all faces: see `face_tensorflow`."""

import ml_dtypes
import torch

import keras_dist.torch as hvd

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64".split()
NARROW = ("float8_e5m2", "float8_e4m3fn")
COUNTS = "int32"
# Recorded: of tensors that require a gradient.
FORMS = ("eager", "recorded", "queued", "in place", "queued in place")
GRADIENTS = ("eager",)
TENSOR = torch.Tensor
NO_GRADIENT = "Average or Sum in an allreduce"
NOT_OF_NUMPY = ("bfloat16", *NARROW)


def raised_for(kinds, form):
    return kinds


def tensor(array):
    if array.dtype.name in NOT_OF_NUMPY:
        return torch.from_numpy(array.astype("float32")).to(getattr(torch, array.dtype.name))
    return torch.tensor(array)


def array(result):
    name, _ = kind_of(result)
    if name in NOT_OF_NUMPY:
        return result.detach().float().numpy().astype(getattr(ml_dtypes, name))
    return result.detach().numpy()


def kind_of(result):
    return str(result.dtype).removeprefix("torch."), result.device


def operation(name, form):
    place = "_" if "in place" in form else ""
    if "queued" not in form:
        return getattr(hvd, name + place, None)
    queue = getattr(hvd, f"{name}_async{place}", None)

    def call(*values, **options):
        handle = queue(*values, **options)
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        return result

    return queue and call


def run(form, program, *tensors):
    if form != "recorded":
        return program(*tensors)
    leaves = [one.requires_grad_() if one.is_floating_point() else one for one in tensors]
    return program(*leaves)


def flat(results):
    return torch.cat([result.reshape(-1) for result in results])


def gradient(form, function, given, weights):
    x = torch.tensor(given, requires_grad=True)
    (flat(function(x)) * torch.tensor(weights)).sum().backward()
    return x.grad.numpy()


def second_gradient(form, function, given, weights, others):
    x = torch.tensor(given, requires_grad=True)
    total = (flat(function(x)) ** 2 * torch.tensor(weights)).sum() / 2
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    (found,) = torch.autograd.grad((slope * torch.tensor(others)).sum(), x)
    return found.numpy()


def sparse_allreduce(form, values, indices, shape, **options):
    given = torch.sparse_coo_tensor(indices[None], values, shape)
    result = hvd.sparse_allreduce_async(given, **options)()  # as in scripts of Horovod
    assert result.is_sparse and result.is_coalesced()
    return result.to_dense()


def broadcast_state(arrays, root_rank, **options):
    state = {str(number): tensor(one) for number, one in enumerate(arrays)}
    assert hvd.broadcast_parameters(state, root_rank, **options) is None
    return list(map(array, state.values()))


def trained(form, weights, batches, options, kind="sgd", rate=0.1, is_sparse=False):
    values = [torch.nn.Parameter(torch.tensor(one)) for one in weights]
    optimizer = {
        "sgd": lambda: torch.optim.SGD(values, rate),
        "momentum": lambda: torch.optim.SGD(values, 0.05, momentum=0.9, weight_decay=1e-3),
        "adam": lambda: torch.optim.Adam(values, 0.01),
    }[kind]()
    if options is not None:
        named = [(str(number), value) for number, value in enumerate(values)]
        assert hvd.DistributedOptimizer(optimizer, named, **options) is optimizer
    for tokens, y in batches:
        optimizer.zero_grad()
        table, kernel, last = values
        rows = torch.nn.functional.embedding(torch.tensor(tokens), table, sparse=is_sparse)
        found = torch.tanh(rows.reshape(len(tokens), -1) @ kernel) @ last
        (found - torch.tensor(y)).square().mean().backward()
        optimizer.step()
        assert table.grad.is_sparse == is_sparse
    return list(map(array, values))


class Halved(hvd.Compressor):
    @staticmethod
    def compress(tensor):
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor * 2).to(ctx)
