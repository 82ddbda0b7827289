"""An interrupted job resumes with another number of ranks at the next unseen sample."""

import json
import os
import textwrap

import pytest

import keras_dist

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="starts jobs of its own")

SCRIPT = """
    import json, sys, keras, numpy as np, torch, keras_dist
    directory, batch, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keras_dist.init()

    class Model(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0][:, 0].int().tolist())
            return super().train_step(data)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if stop and len(seen) == stop:
                raise InterruptedError

    x = np.arange(120, dtype="float32").reshape(-1, 1)
    for data in ((x, x), torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(x))):
        seen = []
        train = keras_dist.data.shard(data, batch, shuffle="global")
        model = Model([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1e-9))
        model.compile(optimizer, "mse", run_eagerly=True)
        backup = keras_dist.callbacks.BackupAndRestore(
            f"{directory}/{type(data).__name__}", save_freq=3
        )
        try:
            model.fit(train, epochs=2, verbose=0, callbacks=keras_dist.callbacks(backup, Stop()))
        except InterruptedError:
            pass
        steps = [sum(step, []) for step in zip(*keras_dist.allgather_object(seen))]
        if keras_dist.rank() == 0:
            print("SEEN", json.dumps(steps))
"""


@pytest.mark.slow
def test_four_ranks_and_then_two(run_ranks, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "KERAS_BACKEND": "torch"}

    def run(ranks, batch, stop):
        ended = run_ranks(ranks, str(script), str(tmp_path), str(batch), str(stop), env=environment)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("SEEN")]
        assert len(lines) == 2, ended.stdout
        return [json.loads(line.removeprefix("SEEN")) for line in lines]

    # 8 samples per step, 15 steps per epoch: the last backup is after step 6 of the second epoch.
    # 4 samples per step: 12 steps have the samples of 6.
    for before, after in zip(run(4, 2, stop=22), run(2, 2, stop=0), strict=True):
        first, second = before[:15], before[15:21]
        assert numbers(first) == list(range(120)) and first[0] != second[0]
        assert len(after) == 18
        assert numbers(second + after) == list(range(120))


def numbers(steps):
    return sorted(number for step in steps for number in step)
