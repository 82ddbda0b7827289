"""keras_dist.torch: the optimizer, the broadcast of state, SyncBatchNorm. See `test_loops`."""

import copy
import gc
import pickle

import pytest
import torch

import keras_dist.torch as hvd
from keras_dist import errors
from keras_dist.ops import gradient_plans

pytestmark = pytest.mark.jobs("tensorflow-2", "torch-1", "double-torch-3")

BATCH, STEPS = 4, 5
several = pytest.mark.skipif(hvd.size() == 1, reason="one rank does not reduce")


@pytest.fixture(autouse=True, scope="module")
def started():
    hvd.init()


@pytest.fixture(params=[True, False], ids=["overlapping", "at the end"])
def overlap(request, monkeypatch):
    """Whether reductions overlap with backpropagation, whatever the number of cores."""
    monkeypatch.setattr(gradient_plans, "overlaps", lambda comm: request.param)


def network(seed=0, width=8):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    )


def data(steps=STEPS, batch=BATCH):
    """Returns the batches of all ranks, concatenated."""
    torch.manual_seed(7)
    count = steps * batch * hvd.size()
    x = torch.randn(count, 3).reshape(steps, batch * hvd.size(), 3)
    return x, torch.sin(x).sum(2, keepdim=True)


def own_rows(rows):
    """Returns this rank's rows of a batch."""
    return rows.reshape(hvd.size(), -1, *rows.shape[1:])[hvd.rank()]


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def train(model, optimizer, choose, steps=STEPS):
    for x, y in zip(*data(steps), strict=True):
        optimizer.zero_grad()
        loss_of(model, choose(x), choose(y)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def wrapped(model, rate=0.1, **options):
    """Returns a distributed optimizer of a model."""
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), rate), **options)


def assert_equal_weights(model, alone):
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


def same_on_all(tensors):
    return all(
        torch.equal(*pair) for tensor in tensors for pair in [(tensor, hvd.broadcast(tensor, 0))]
    )


def test_the_state_is_that_of_a_plain_optimizer():
    model = network(seed=hvd.rank())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # before it is wrapped
    given = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert given is optimizer and isinstance(given, torch.optim.Adam)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert same_on_all(train(model, optimizer, own_rows))
    schedule.step()
    assert same_on_all(train(model, optimizer, own_rows, steps=1))
    plain = torch.optim.Adam(network().parameters(), 0.01)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict().keys() == optimizer.state_dict().keys()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for made in (plain, *copies):
        assert type(made) is torch.optim.Adam and made.param_groups[0]["lr"] == 0.005


def test_groups_of_parameters_and_deprecated_num_groups():
    model = network()
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    assert same_on_all(train(model, wrapped(model, groups=layers), own_rows))
    with pytest.warns(DeprecationWarning, match=r"removed in keras_dist 2\.0: pass groups"):
        wrapped(model, num_groups=2)


def test_the_passes_of_an_incomplete_step_are_dropped_or_used(overlap):
    alone, model = network(), network()
    plain = torch.optim.SGD(alone.parameters(), 0.02)
    optimizer = wrapped(model, 0.02, backward_passes_per_step=2)
    batches = list(zip(*data(6), strict=True))
    for drops in (True, False, True):
        for number, (x, y) in enumerate(batches[:5]):
            if number % 2 == 0:
                plain.zero_grad()
                optimizer.zero_grad()  # the last batch of an epoch may have no partner
            loss_of(alone, x, y).backward()
            loss_of(model, own_rows(x), own_rows(y)).backward()
            if number % 2 or (number == 4 and not drops):
                plain.step()
                optimizer.step()
    assert_equal_weights(model, alone)
    if hvd.size() > 1:
        model.zero_grad()  # which the optimizer does not see
        loss_of(model, own_rows(x), own_rows(y)).backward()
        with pytest.raises(errors.UsageError, match=r"optimizer.zero_grad\(\) to drop them"):
            loss_of(model, own_rows(x), own_rows(y)).backward()
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert same_on_all(train(model, optimizer, own_rows))


@several
def test_an_extra_backward_pass_or_zero_grad_is_an_error_and_the_job_continues(overlap):
    model = network()
    optimizer = wrapped(model, named_parameters=model.named_parameters())
    x, y = own_rows(data()[0][0]), own_rows(data()[1][0])
    for _ in range(2):  # in the second round, the first pass queues buckets
        loss_of(model, x, y).backward()
        with pytest.raises(errors.UsageError, match="2 times, before step"):
            loss_of(model, x, y).backward()
        optimizer.zero_grad()
        assert same_on_all(train(model, optimizer, own_rows))
        loss_of(model, x, y).backward()
        with pytest.raises(
            errors.UsageError,
            match=r"zero_grad.*With a GradScaler, call synchronize\(\).*requires_grad_",
        ):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def test_synchronize_then_clip_then_step(overlap, recwarn):
    alone, model = network(), network()
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    optimizer = wrapped(model)
    for x, y in zip(*data(), strict=True):
        plain.zero_grad()
        optimizer.zero_grad()
        loss_of(alone, x, y).backward()
        loss_of(model, own_rows(x), own_rows(y)).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain.step()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_equal_weights(model, alone)
    loss_of(model, x, y).backward()
    optimizer.step()
    assert [str(warning.message) for warning in recwarn] == []
    optimizer.synchronize()
    optimizer.step()  # outside `skip_synchronize`
    assert ["skip_synchronize" in str(warning.message) for warning in recwarn] == [True]


def test_gradients_written_to_after_backward_are_reduced_as_written(overlap, monkeypatch):
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: 1)
    model = network()
    optimizer = wrapped(model, 0.0)
    odd = hvd.rank() == hvd.size() - 1
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(hvd.rank() + step))).sum().backward()
        # As a script that replaces what is not finite, on one rank or on all.
        if step == 3 or (odd and step == 1):
            for parameter in model.parameters():
                parameter.grad.fill_(step + hvd.rank())
        mine = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        for parameter, gradient in zip(model.parameters(), mine, strict=True):
            torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))


def test_an_overflow_on_one_rank_is_skipped_on_all(overlap):
    model = network()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        overflows = step == 1 and hvd.rank() == hvd.size() - 1
        scaler.scale(model(torch.ones(2, 3)).sum() * (torch.inf if overflows else 1)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if step == 0 else 2.0)
        kept = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(kept) == any(kept) == (step == 1)
    assert same_on_all(model.parameters())


@pytest.mark.parametrize("dense", [False, True])
def test_rows_that_some_ranks_lack_or_have_as_a_whole(dense, overlap):
    table = torch.nn.Parameter(torch.ones(4, 2))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([table, unused], 1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense)
    rows = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (4, 2))
    expected = torch.ones(4, 2)
    for step in range(4):
        optimizer.zero_grad()
        has = [(rank + step) % 2 == 0 for rank in range(hvd.size())]
        if has[hvd.rank()] and step < 3:
            table.grad = rows
        elif step == 3:
            table.grad = rows if hvd.rank() == 0 else torch.ones(4, 2)
        optimizer.step()
        assert unused.grad is None
        if step < 3 and any(has):
            assert table.grad.is_sparse or (dense and not has[hvd.rank()])
            mean = rows.to_dense() * (sum(has) / hvd.size())
            expected = expected - mean
        elif step == 3:
            mean = (rows.to_dense() + torch.ones(4, 2) * (hvd.size() - 1)) / hvd.size()
            expected = expected - mean
        torch.testing.assert_close(table, expected)
    assert torch.equal(unused, torch.ones(2))
    assert same_on_all([table])


def test_a_parameter_that_is_frozen_on_one_rank(overlap):
    model = network()
    model[0].requires_grad_(hvd.rank() != 0 or hvd.size() == 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for x, y in zip(*data(), strict=True):
        optimizer.zero_grad()
        loss_of(model, own_rows(x), own_rows(y)).backward()
        mine = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        optimizer.step()
        for parameter, gradient in zip(model.parameters(), mine, strict=True):
            torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))
    assert same_on_all(model.parameters())


@several
@pytest.mark.parametrize("differs", ["order", "dtype"])
def test_parameters_that_differ_are_named(differs):
    dtype = torch.float64 if differs == "dtype" and hvd.rank() == 1 else torch.float32
    named = [(name, torch.nn.Parameter(torch.ones(2, dtype=dtype))) for name in ("left", "right")]
    if differs == "order" and hvd.rank() == 0:
        named.reverse()
    sgd = torch.optim.SGD([parameter for _, parameter in named], 1.0)
    optimizer = hvd.DistributedOptimizer(sgd, named)
    sum(parameter.sum() for _, parameter in named).backward()
    text = {
        "order": "2 variables, '.*', '.*' as on rank 0",
        "dtype": "the gradient of '(left|right)' as",
    }
    with pytest.raises(errors.MismatchError, match=text[differs]):
        optimizer.step()


class Searching(torch.optim.LBFGS):
    """Records the weights at which the line search calls the closure, and the loss there.

    The end of the search is not compared: the search amplifies rounding errors.
    """

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        self.seen = []

    def step(self, closure):
        parameters = self.param_groups[0]["params"]

        def noted():
            weights = [parameter.detach().clone() for parameter in parameters]
            loss = closure()
            gradients = [parameter.grad.clone() for parameter in parameters]
            self.seen.append((weights, loss.detach(), gradients))
            return loss

        return super().step(noted)


def test_closures_return_averaged_losses_and_gradients():
    model, alone = network(), network()
    optimizer = hvd.DistributedOptimizer(Searching(model.parameters()))
    x, y = (rows[0] for rows in data(1))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, own_rows(x), own_rows(y))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert len(optimizer.seen) > len(losses) and losses[-1] < losses[0]
    for weights, loss, gradients in optimizer.seen:
        torch.nn.utils.vector_to_parameters(
            torch.cat([weight.ravel() for weight in weights]), alone.parameters()
        )
        alone.zero_grad()
        expected = loss_of(alone, x, y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-7)
        for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
    assert same_on_all([parameter.detach() for parameter in model.parameters()])


def test_bfloat16_and_half():
    for dtype in (torch.bfloat16, torch.float16):
        model = torch.nn.Linear(2, 1, bias=False).to(dtype)
        torch.nn.init.zeros_(model.weight)
        optimizer = wrapped(model, 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, 2, dtype=dtype)).sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
        assert model.weight.tolist() == [[-(hvd.size() + 1.0)] * 2]


def test_adasum_of_equal_gradients_is_that_gradient():
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(ValueError, match="power of two"):
            wrapped(network(), op=hvd.Adasum)
        return
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = wrapped(model, 0.0, op=hvd.Adasum)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_invalid_arguments_are_errors():
    model = network()
    named = list(model.named_parameters())
    for wrong, match in [
        ({"named_parameters": [named[0], named[0]]}, "twice"),
        ({"named_parameters": named[:1]}, "none for 3"),
        ({"named_parameters": model.parameters()}, "pairs"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"op": hvd.Max}, "Average, Sum or Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
        *(({"groups": groups}, "groups") for groups in (0, "two", [model])),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            wrapped(model, **wrong)
    with pytest.raises(ValueError, match="distributed"):
        hvd.DistributedOptimizer(wrapped(model))
    with pytest.raises(TypeError, match="optimizer of torch"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(TypeError, match="named_parameters"):
        hvd.broadcast_parameters(model.parameters(), 0)


def test_parameters_that_require_gradients_later(overlap):
    model = network()
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    assert same_on_all(train(model, optimizer, own_rows, steps=2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [extra := torch.nn.Parameter(torch.zeros(1))]})
    for x, y in zip(*data(), strict=True):
        optimizer.zero_grad()
        (loss_of(model, own_rows(x), own_rows(y)) + extra.sum() * hvd.rank()).backward()
        optimizer.step()
    assert same_on_all([*model.parameters(), extra])
    assert extra.item() == pytest.approx(-0.1 * STEPS * (hvd.size() - 1) / 2)


def test_parameters_in_place_of_others_that_are_gone(overlap):
    first, *others = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, *others], 0.1))
    [group] = optimizer.param_groups

    def step():
        optimizer.zero_grad()
        sum(parameter.sum() * (hvd.rank() + 1) for parameter in group["params"]).backward()
        optimizer.step()

    step()
    group["params"] = [torch.nn.Parameter(torch.zeros(2)), *others]
    del first
    gc.collect()
    for _ in range(2):
        step()
    assert same_on_all(group["params"])
    mean = (hvd.size() + 1) / 2
    values = [parameter[0].item() for parameter in group["params"]]
    assert values == pytest.approx([-0.1 * steps * mean for steps in (2, 3, 3)])


def test_broadcast_of_optimizer_state():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (hvd.rank() + 1))
    if hvd.rank() == 0:
        train(model, optimizer, own_rows, steps=2)  # only the root has state
    hvd.broadcast_parameters(model.named_parameters(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    assert [float(each["step"]) for each in state["state"].values()] == [2.0] * 4
    assert same_on_all([each["exp_avg_sq"] for each in state["state"].values()])
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm_equals_batch_norm_of_the_global_batch(momentum):
    torch.manual_seed(3)
    lengths = [3 + 2 * rank for rank in range(hvd.size())]
    x = torch.randn(sum(lengths), 4, 5, dtype=torch.float64) * 3 + 1
    weights = torch.randn_like(x)
    one = torch.nn.BatchNorm1d(4, momentum=momentum).double()
    sync = hvd.SyncBatchNorm(4, momentum=momentum).double()
    for layer in (one, sync):
        torch.nn.init.constant_(layer.weight, 1.5)
    global_batch = x.clone().requires_grad_()
    local_batch = torch.split(x, lengths)[hvd.rank()].clone().requires_grad_()
    for _ in range(2):
        expected = one(global_batch)
        found = sync(local_batch)
    (expected * weights).sum().backward()
    (found * torch.split(weights, lengths)[hvd.rank()]).sum().backward()
    torch.testing.assert_close(found, torch.split(expected, lengths)[hvd.rank()])
    torch.testing.assert_close(
        local_batch.grad, torch.split(global_batch.grad, lengths)[hvd.rank()]
    )
    torch.testing.assert_close(hvd.allreduce(sync.weight.grad, op=hvd.Sum), one.weight.grad)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(sync.state_dict()[name], value)
    torch.testing.assert_close(sync.eval()(x), one.eval()(x))


def test_join_excludes_ranks_without_data(overlap):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = wrapped(model, 1.0)
    expected = 0.0
    for step in range(2 * (hvd.size() - hvd.rank())):
        here = [rank for rank in range(hvd.size()) if step < 2 * (hvd.size() - rank)]
        expected -= sum(here) / len(here)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)).sum() * hvd.rank()).backward()
        optimizer.step()
    assert model.weight.item() == pytest.approx(expected)
    assert hvd.join() == 0


@pytest.mark.parametrize("op", ["average", "adasum"])
def test_a_parameter_without_a_gradient_on_any_rank_is_not_updated(op, overlap):
    if op == "adasum" and hvd.size() & (hvd.size() - 1):
        pytest.skip("Adasum needs a power of two ranks")

    def make():
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        return parameters, torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)

    (used, some, unused), optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, op=op)
    (plain_used, plain_some, _), plain = make()
    for step in range(4):
        optimizer.zero_grad()
        loss = used.sum()
        if step == 1 or hvd.rank() == 0:  # otherwise only rank 0 has a gradient
            loss = loss + some.sum() + (unused.sum() if step == 3 else 0)
        loss.backward()
        optimizer.step()
        assert step == 3 or unused.grad is None
        assert step == 3 or torch.equal(unused, torch.ones(3))
        plain_used.grad = torch.ones(3)
        share = 1.0 if step == 1 or op == "adasum" else 1 / hvd.size()
        plain_some.grad = torch.full((3,), share)
        plain.step()
    torch.testing.assert_close(used, plain_used)
    torch.testing.assert_close(some, plain_some)
    assert unused.grad is not None and (unused < 1).all()
