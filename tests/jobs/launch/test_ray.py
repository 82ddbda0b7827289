"""Ranks in the workers of a real Ray cluster on this host."""

import os
import pathlib
import re
import time

import pytest
from start_jobs import HANG_SECONDS, launcher

from keras_dist import errors
from keras_dist.resume import format

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'keras_dist[ray]'")
pytest.importorskip("ray.train", reason="needs all packages of Ray Train", exc_type=ImportError)

import keras_dist.ray  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(launcher()) > 1, reason="needs MPICH"),
]
ray.cloudpickle.register_pickle_by_value(__import__(__name__))

TORCH = {"KERAS_BACKEND": "torch"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


class Member:
    """A rank without a framework."""

    def __init__(self, start):
        import keras_dist
        from keras_dist import _backends

        class Nothing:
            name = "nothing"

            def pin_device(*args): ...
            def gpu_number(): ...
            def limit_threads(*args, **kwargs): ...
            def finish_calls(): ...

        _backends.active = lambda: Nothing
        keras_dist.init()
        self.value = start + keras_dist.rank()


def ranks_and_sum():
    import numpy as np

    import keras_dist

    total = keras_dist.allreduce(np.ones(3), op=keras_dist.Sum)
    return keras_dist.rank(), keras_dist.size(), total.tolist()


def fails(end):
    import keras_dist

    if keras_dist.rank() == 0:
        keras_dist.barrier()
    elif end == "raises":
        raise ValueError("broken on purpose")
    elif end == "is killed":
        os.kill(os.getpid(), 9)


def test_ranks_stay_between_calls_and_a_lost_one_is_an_error():
    settings = keras_dist.ray.RayExecutor.create_settings(
        HANG_SECONDS, placement_group_timeout_s=HANG_SECONDS
    )
    executor = keras_dist.ray.RayExecutor(settings, num_workers=2)
    executor.start(Member, (10,), extra_env_vars=TORCH)
    for _ in range(2):
        assert executor.run(ranks_and_sum) == [(0, 2, [2.0] * 3), (1, 2, [2.0] * 3)]
    assert executor.execute(lambda member: member.value) == [10, 11]
    assert executor.execute_single(lambda member: member.value) == 10
    for end in ("raises", "is killed", "returns"):
        with pytest.raises(errors.RankError) as caught:
            executor.run(fails, (end,))
        if end == "returns":
            assert "end of the function" in str(caught.value) and "barrier" in str(caught.value)
        else:
            assert "rank 1 of 2" in str(caught.value)
        assert (end == "raises") == isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(errors.RankError, match="Call start again"):
            executor.run(ranks_and_sum)
        executor.start(Member, (0,), extra_env_vars=TORCH)
        assert [rank for rank, *_ in executor.run(ranks_and_sum)] == [0, 1]
    executor.shutdown()


def test_too_few_resources_are_an_error():
    settings = keras_dist.ray.RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(errors.LaunchError, match=r"3 workers with \{'CPU': 1\} within 1 s"):
        keras_dist.ray.RayExecutor(settings, num_workers=3).start()


def test_actors_that_do_not_answer_are_an_error(monkeypatch):
    class Silent:
        def node(self):
            time.sleep(60)

    monkeypatch.setattr("keras_dist.ray.executor.Rank", Silent)
    settings = keras_dist.ray.RayExecutor.create_settings(
        0.1, placement_group_timeout_s=HANG_SECONDS
    )
    made = keras_dist.ray.RayExecutor(settings)
    with pytest.raises(errors.LaunchError, match=r"1 actors to answer within 0\.1 s"):
        made.start()


def test_a_wrong_use_is_an_error():
    with pytest.raises(errors.ArgumentError, match=r"num_workers to be 1 or more\. Received: 0"):
        keras_dist.ray.RayExecutor(num_workers=0)
    with pytest.raises(errors.LaunchError, match="Call start first"):
        keras_dist.ray.RayExecutor().run(ranks_and_sum)


def train(config):
    import sys

    sys.modules.update(dict.fromkeys(["tensorflow", "jax", "sklearn"]))  # Keras imports them
    import keras
    import numpy as np

    import keras_dist
    import keras_dist.ray

    class End(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch != 2 or keras_dist.rank() != 1 or os.path.exists(config["mark"]):
                return
            with open(config["mark"], "w"):
                pass
            if config["end"] == "is killed":
                os.kill(os.getpid(), 9)
            raise ValueError("broken on purpose")

    keras_dist.init()
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    data = keras_dist.data.shard((x, x.sum(1, keepdims=True)), batch_size=8)
    backup = keras_dist.callbacks.BackupAndRestore("state/backup")
    report = keras_dist.ray.ReportCallback("state")
    model.fit(data, epochs=4, verbose=0, callbacks=keras_dist.callbacks(backup, report, End()))
    context = ray.train.get_context()
    ranks = keras_dist.rank(), keras_dist.size()
    assert ranks == (context.get_world_rank(), context.get_world_size())
    return model.get_weights()[0].tolist()


def fit(folder, end, failures=0, function=train, env=TORCH):
    trainer = keras_dist.ray.KerasTrainer(
        function,
        train_loop_config={"end": end, "mark": str(folder / f"mark-{end}")},
        keras_config=keras_dist.ray.KerasConfig(timeout=HANG_SECONDS),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder),
            worker_runtime_env={"env_vars": env},
            failure_config=ray.train.FailureConfig(max_failures=failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def test_ray_starts_lost_workers_again_from_the_checkpoint(tmp_path):
    (tmp_path / "mark-returns").touch()
    whole, resumed = fit(tmp_path, "returns"), fit(tmp_path, "is killed", failures=1)
    for result in (whole, resumed):
        assert result.metrics["epoch"] == 4 and result.metrics["loss"] > 0
        assert len(result.best_checkpoints) == 2
        with result.checkpoint.as_directory() as folder:
            found = format.newest_first(pathlib.Path(folder) / "backup")
            assert len(found) == 2 and not any(format.find_damage(format.read(p)) for p in found)
    assert whole.return_value == resumed.return_value
    assert whole.metrics["loss"] == resumed.metrics["loss"]


def test_an_error_of_a_rank_is_that_of_its_worker(tmp_path):
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(tmp_path, "raises")
    assert isinstance(caught.value.worker_failures[1], ValueError)


def returns_early(config):
    Member(0)
    fails("returns")


def test_a_rank_that_ends_while_others_wait_is_an_error(tmp_path):
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(tmp_path, "returns", function=returns_early)
    found = caught.value.worker_failures.values()
    assert any(isinstance(error, errors.MismatchError) for error in found)


def test_a_worker_that_cannot_join_says_why(tmp_path):
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(tmp_path, "returns", function=returns_early, env={**TORCH, "PMI_SIZE": "2"})
    found = map(str, caught.value.worker_failures.values())  # of the first worker that failed
    assert any(re.search("a process that is not a rank yet", error) for error in found)
