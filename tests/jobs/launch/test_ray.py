"""Ranks in the workers of a real Ray cluster on this host."""

import builtins
import os
import pathlib
import time

import cluster_training
import pytest
from cluster_training import fail, join, join_and_fail
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
for module in (cluster_training, __import__(__name__)):
    ray.cloudpickle.register_pickle_by_value(module)

TORCH = {"KERAS_BACKEND": "torch"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # By default all that runs beside these tests comes before their ranks.
        patch.setenv("RAY_worker_niceness", "0")
        patch.setattr(builtins, "print", print)  # Ray replaces it, also for later tests
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000
        )
        yield
        ray.shutdown()


class Member:
    def __init__(self, start):
        join()
        import keras_dist

        self.value = start + keras_dist.rank()


def ranks_and_sum():
    import numpy as np

    import keras_dist

    total = keras_dist.allreduce(np.ones(3), op=keras_dist.Sum)
    return keras_dist.rank(), keras_dist.size(), total.tolist()


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
            executor.run(fail, (end,))
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

    class KillOnce(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2 and keras_dist.rank() == 1 and not os.path.exists(config["mark"]):
                pathlib.Path(config["mark"]).touch()
                os.kill(os.getpid(), 9)

    keras_dist.init()

    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
        data = keras_dist.data.shard((x, x.sum(1, keepdims=True)), batch_size=8)
        ours = keras_dist.callbacks(*callbacks)
        history = model.fit(data, epochs=4, verbose=0, callbacks=ours).history
        return model.get_weights()[0].tolist(), history["loss"][-1]

    backup = keras_dist.callbacks.BackupAndRestore("state/backup")
    resumed = fit(backup, keras_dist.ray.ReportCallback("state"), KillOnce())
    context = ray.train.get_context()
    ranks = keras_dist.rank(), keras_dist.size()
    assert ranks == (context.get_world_rank(), context.get_world_size())
    return resumed, fit()


def run_trainer(function, folder, failures=0, **config):
    trainer = keras_dist.ray.KerasTrainer(
        function,
        train_loop_config=config,
        keras_config=keras_dist.ray.KerasConfig(timeout=HANG_SECONDS),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder),
            worker_runtime_env={"env_vars": {**TORCH, **config.get("env", {})}},
            failure_config=ray.train.FailureConfig(max_failures=failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def test_ray_starts_lost_workers_again_from_the_checkpoint(tmp_path):
    result = run_trainer(train, tmp_path, failures=1, mark=str(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()
    assert result.metrics["epoch"] == 4 and len(result.best_checkpoints) == 2
    with result.checkpoint.as_directory() as folder:
        found = format.newest_first(pathlib.Path(folder) / "backup")
        assert len(found) == 2 and not any(format.find_damage(format.read(p)) for p in found)
    resumed, uninterrupted = result.return_value
    assert resumed == uninterrupted
    assert result.metrics["loss"] == uninterrupted[1] > 0


@pytest.mark.parametrize(
    ("end", "env", "kind", "reason"),
    [
        ("raises", {}, ValueError, "broken on purpose"),
        ("returns", {}, errors.MismatchError, "Expected barrier"),
        ("returns", {"PMI_SIZE": "2"}, errors.LaunchError, "a process that is not a rank yet"),
    ],
    ids=["raises", "returns early", "cannot join"],
)
def test_an_error_of_a_worker_is_passed_on(tmp_path, end, env, kind, reason):
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        run_trainer(lambda config: join_and_fail(config["end"]), tmp_path, end=end, env=env)
    found = caught.value.worker_failures  # of the first worker that failed, or of both
    assert any(isinstance(error, kind) and reason in str(error) for error in found.values())
    if end == "raises":
        assert isinstance(found[1], ValueError)
