"""Elastic states of modules and optimizers of torch, without a failure."""

import os
import threading
import tracemalloc

import numpy as np
import pytest
import torch

import keras_dist
import keras_dist.torch as hvd
from keras_dist import elastic, errors
from keras_dist.elastic import model_states

pytestmark = pytest.mark.jobs("torch-2")

RANK = keras_dist.rank()


def test_a_torch_state_keeps_its_sampler_in_place(shared_tmp_path):
    assert hvd.elastic.ElasticSampler is hvd.ElasticSampler
    sampler, further = hvd.ElasticSampler(range(12)), torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(
        directory=shared_tmp_path, sampler=sampler, further=further, batch=0
    )
    state.sync()
    assert (further.weight.detach().numpy() == keras_dist.broadcast(further.weight.detach())).all()
    share = list(sampler)
    sampler.record_batch(0, 2)
    state.commit()
    done = set().union(*keras_dist.allgather_object(share[:2]))
    assert list(sampler) == share  # only restore and sync reshard
    sampler.record_batch(1, 2)
    state.restore()
    assert state.sampler is sampler
    assert sampler.processed_indices == done
    assert set().union(*keras_dist.allgather_object(list(sampler))) == set(range(12)) - done
    fresh = hvd.ElasticSampler(range(12))
    hvd.elastic.TorchState(
        directory=shared_tmp_path, sampler=fresh, further=further, batch=0
    ).sync()
    assert list(fresh) == list(sampler)


@pytest.mark.parametrize("count", [0, 3, 20_000])
def test_a_sampler_of_many_ranks_takes_memory_for_its_data_set_once(monkeypatch, count):
    monkeypatch.setattr(keras_dist.runtime, "size", lambda: 1000)
    monkeypatch.setattr(keras_dist.runtime, "rank", lambda: 999)
    tracemalloc.start()
    try:
        sampler = hvd.ElasticSampler(range(count), shuffle=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sampler.indices == {0: [], 3: [0], 20_000: [*range(999, count, 1000)]}[count]
    assert peak < 4e6


def test_a_torch_state_is_synchronised_and_restored(shared_tmp_path, monkeypatch):
    # As written by a rank 0 whose module is on a GPU.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    state = elastic.TorchState(module, optimizer, directory=shared_tmp_path, epoch=0)
    state.sync()
    weight = module.weight.detach().numpy().copy()
    assert (weight == keras_dist.broadcast(weight)).all()
    state.commit()
    module(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    state.restore()
    assert (module.weight.detach().numpy() == weight).all()
    other = torch.nn.Linear(2, 1)
    again = elastic.TorchState(other, directory=shared_tmp_path, epoch=7)
    with pytest.raises(errors.CheckpointError):
        again.sync()
    again = elastic.TorchState(
        other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), shared_tmp_path, epoch=7
    )
    again.sync()
    assert again.epoch == 0
    assert (other.weight.detach().numpy() == weight).all()


def test_a_torch_state_goes_back_between_backward_and_step():
    module = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    raised = []

    @elastic.run
    def train(state):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(1, 2) * (RANK + 1)).sum().backward()
            if state.step == 1 and not raised:
                raised.append(True)
                raise elastic.HorovodInternalError("not a number")
            optimizer.step()
            state.step += 1
            state.commit()
        return module.weight.detach().numpy()

    weight = train(elastic.TorchState(module, optimizer, step=0))
    assert raised and (keras_dist.broadcast(weight) == weight).all()


def test_a_torch_state_with_numbers_of_numpy(shared_tmp_path):
    def parts(rate):
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, np.cos)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 2]))
        return {"model": module, "optimizer": optimizer, "scheduler": scheduler, "steps": steps}

    here = parts(0.1 * np.sqrt(keras_dist.size()))
    state = elastic.TorchState(directory=shared_tmp_path, **here)
    state.sync()
    state.commit()
    state.optimizer.param_groups[0]["lr"] = 9.0
    state.restore()
    there = parts(np.float64(1))
    elastic.TorchState(directory=shared_tmp_path, **there).sync()
    for mine in (here, there):
        [rate] = [group["lr"] for group in mine["optimizer"].param_groups]
        assert rate == pytest.approx(0.1 * np.sqrt(keras_dist.size()))
        assert mine["steps"].milestones == {1: 1, 2: 1}


def test_a_torch_state_that_a_directory_cannot_keep_is_named(shared_tmp_path):
    class Timed(torch.nn.Linear):
        """Has a state that is not a tensor."""

        def get_extra_state(self):
            return {"kind": os.getpid}

        def set_extra_state(self, state):
            self.kind = state["kind"]

    module = Timed(2, 1)
    state = elastic.TorchState(further=module)
    state.sync()
    state.restore()
    assert module.kind is os.getpid
    state = elastic.TorchState(further=module, directory=shared_tmp_path)
    done = threading.Event()
    # A thread that might call what another rank calls.
    threading.Thread(target=done.wait, daemon=True).start()
    with pytest.raises(errors.ArgumentTypeError, match=r"state_dict of further.* posix\.getpid in"):
        state.commit()
    done.set()


def test_reading_a_torch_state_executes_no_code(shared_tmp_path, monkeypatch):
    class Calls:
        def __reduce__(self):
            return os.mkdir, (str(shared_tmp_path / "called"),)

    class Prepared(torch.nn.Linear):
        def get_extra_state(self):
            return Calls()

        def set_extra_state(self, state): ...

    with monkeypatch.context() as patch:
        patch.setattr(model_states, "_check_part", lambda name, raw: None)
        elastic.TorchState(further=Prepared(2, 1), directory=shared_tmp_path).commit()
    with pytest.raises(errors.CheckpointError, match=r"unsupported GLOBAL .*mkdir"):
        elastic.TorchState(further=torch.nn.Linear(2, 1), directory=shared_tmp_path).sync()
    assert not (shared_tmp_path / "called").exists()
