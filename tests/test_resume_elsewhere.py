"""An interrupted job resumes with another number of ranks at the next unseen sample."""

import json
import os

import pytest
from jobs import SCRIPTS

import keras_dist

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="starts jobs of its own")


@pytest.mark.slow
def test_four_ranks_and_then_two(run_ranks, tmp_path):
    script = SCRIPTS / "seen_samples.py"
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
