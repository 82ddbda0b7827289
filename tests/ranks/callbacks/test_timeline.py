"""The timeline of training and of collectives, as recorded by every rank."""

import collections
import types
from pathlib import Path

import numpy as np
import pytest
import traces
from small_training import BATCH, STEPS, distributed, make_data

import keras_dist
from keras_dist import errors, runtime
from keras_dist.monitor.timeline import recording, trace

pytestmark = pytest.mark.jobs("tensorflow-2")


@pytest.fixture
def record(shared_tmp_path):
    """A function that records while another runs, and returns the trace on every rank."""

    def run(work, name="t.json", **options):
        path = shared_tmp_path / name
        keras_dist.start_timeline(path, **options)
        work()
        keras_dist.stop_timeline()
        keras_dist.barrier()  # rank 0 has written it
        assert [file.name for file in shared_tmp_path.glob(f"{name}*")] == [name]
        return traces.load(path)

    return run


def test_training(record):
    model = distributed()
    data = keras_dist.data.shard(make_data(STEPS * BATCH * keras_dist.size()), batch_size=BATCH)

    def train():
        for epochs in (2, 1):
            callbacks = keras_dist.callbacks()
            model.fit(data, validation_data=data, epochs=epochs, callbacks=callbacks, verbose=0)
        model.predict(data, verbose=0)

    trace = record(train)
    for rank in range(keras_dist.size()):
        counts = collections.Counter(bar["name"] for bar in traces.bars(trace, rank=rank))
        expected = {"fit": 2, "epoch": 3, "step": 3 * STEPS, "evaluate": 3, "predict": 1}
        assert {name: counts[name] for name in expected} == expected
        assert counts["compute"] >= 3 * STEPS
        steps = [bar["args"]["number"] for bar in traces.bars(trace, "step", rank)]
        assert steps == list(range(3 * STEPS))
        if keras_dist.size() > 1:
            reduced = traces.bars(trace, "the reduction of gradients", rank)
            assert len(reduced) == 3 * STEPS
            assert reduced[0]["args"]["bytes"] == 4 * model.count_params()
    assert "training" in traces.lanes_of(trace).values()
    last = [bar["args"]["last"] for bar in traces.bars(trace, "wait for ranks") if "args" in bar]
    assert set(last) <= set(range(keras_dist.size()))


@pytest.mark.jobs("torch-3")
def test_collectives_by_hand(record):
    ranks = keras_dist.size()
    if ranks == 1:
        pytest.skip("one rank has nobody to talk to")
    own = keras_dist.add_process_set([0, ranks - 1] if ranks > 2 else [ranks - 1])

    def talk():
        keras_dist.allreduce(np.ones(1000, "float32"), name="loss")
        keras_dist.broadcast(np.ones(1000), 0, name="table")
        handle = keras_dist.allreduce_async(np.ones(500), name="later")
        keras_dist.synchronize(handle)
        if own.included():
            keras_dist.allreduce(np.ones(10), name="ours", process_set=own)
        keras_dist.barrier()

    trace = record(talk)
    keras_dist.remove_process_set(own)
    lanes = traces.lanes_of(trace)
    found = collections.defaultdict(set)
    for bar in traces.bars(trace):
        found[bar["name"]].add((bar["pid"], lanes[bar["pid"], bar["tid"]]))
    everyone = range(ranks)
    assert found["allreduce 'loss'"] == {(rank, "communication") for rank in everyone}
    assert found["broadcast 'table'"] == {(rank, "communication") for rank in everyone}
    behind = "communication, queued"
    assert found["allreduce 'later'"] == {(rank, behind) for rank in everyone}
    if ranks > 2:
        lane = f"communication of ranks 0, {ranks - 1}"
        assert found["allreduce 'ours'"] == {(rank, lane) for rank in (0, ranks - 1)}
    nbytes = {bar["args"]["bytes"] for bar in traces.bars(trace, "allreduce 'loss'")}
    assert nbytes == {4000}
    last = [bar["args"]["last"] for bar in traces.bars(trace, "wait for ranks") if "args" in bar]
    assert last


def test_a_window_of_the_steps_of_a_model_that_was_trained_before(record):
    model, data = distributed(), make_data(BATCH)
    model.train_on_batch(*data)

    def train():
        for _ in range(10):
            model.train_on_batch(*data)

    trace = record(train, steps=(3, 5))
    for rank in range(keras_dist.size()):
        numbers = [bar["args"]["number"] for bar in traces.bars(trace, "step", rank)]
        assert numbers == [3, 4]
    reduced = 2 * keras_dist.size() if keras_dist.size() > 1 else 0
    assert len(traces.bars(trace, "the reduction of gradients")) == reduced


def test_a_limit_of_size_ends_it_and_says_so(record, shared_tmp_path, caplog):
    if keras_dist.size() == 1:
        pytest.skip("one rank records nothing here")

    def talk():
        for _ in range(300):
            keras_dist.allreduce(np.ones(10), name="small")

    trace = record(talk, mbytes=0.05 * keras_dist.size())
    size = (shared_tmp_path / "t.json").stat().st_size
    assert 0.6 * 0.05e6 < size / keras_dist.size() < 1.5 * 0.05e6
    about = trace["otherData"]["keras_dist"]["ranks"]
    assert all(said["full_at_step"] == 0 for said in about)
    notes = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(notes) == keras_dist.size()
    assert notes[0] == "rank 0 recording ended: the timeline reached its size"
    assert "the trace has reached its size (KERAS_DIST_TIMELINE_MBYTES)" in caplog.text


def test_starting_again_writes_the_first(shared_tmp_path):
    first, second = shared_tmp_path / "1.json", shared_tmp_path / "2.json"
    keras_dist.stop_timeline()  # no effect without a recording
    keras_dist.start_timeline(first)
    keras_dist.start_timeline(second, mark_cycles=True)
    keras_dist.barrier()
    assert traces.load(first)["otherData"]["keras_dist"]["complete"] is True
    keras_dist.stop_timeline()
    keras_dist.barrier()
    assert len(traces.load(second)["otherData"]["keras_dist"]["ranks"]) == keras_dist.size()


@pytest.mark.parametrize("options", [{"steps": (5, 5)}, {"steps": (-1, None)}, {"mbytes": 0}])
def test_wrong_arguments_are_refused(options):
    with pytest.raises(errors.ArgumentError, match=f"Received: {next(iter(options))}="):
        keras_dist.start_timeline("t.json", **options)


def test_the_root_gets_recordings_that_it_cannot_read(tmp_path):
    comm = runtime.communicator()
    rank, path = keras_dist.rank(), str(tmp_path / "timeline.json")  # a directory of each rank
    own = Path(trace.part_path(path, rank))
    own.write_text(f'{{"job": "one", "rank": {rank}}}\n' + "[0]\n" * rank)
    part = types.SimpleNamespace(head={"path": path, "job": "one", "rank": rank}, path=str(own))
    assert recording._merge(comm, part) is (rank == 0)
    if rank == 0:
        found = [Path(part).read_text() for part in trace.parts_of(path, "one")]
        assert [text.count("[0]") for text in found] == list(range(keras_dist.size()))
