"""Watching a job: what a rank says of itself, how it is drawn, served and found."""

import json
import math

from keras_dist.watching import gpu
from keras_dist.watching.report import Report


def test_a_report_is_a_line_of_json_that_any_reader_takes():
    device = gpu.Gpu("H200", 0.5, 10, 100)
    report = Report(1, "node", 7, 1.5, "fit", step=3, logs={"loss": math.nan, "a": 0.5}, gpu=device)
    line = report.to_json()
    assert json.loads(line, parse_constant=None)["logs"] == {"loss": "nan", "a": 0.5}
    assert "NaN" not in line and "\n" not in line
    again = Report.from_json(line)
    assert math.isnan(again.logs.pop("loss"))
    assert again.gpu == device and again.step == 3 and again.logs == {"a": 0.5}
    # One that a later version has sent.
    assert Report.from_json(line[:-1] + ', "new": 1}').rank == 1


def test_gpus_are_those_that_cuda_sees():
    uuids = ["GPU-aa", "GPU-ab", "GPU-b"]

    def seen(text):
        return gpu.visible(3, uuids, {"CUDA_VISIBLE_DEVICES": text})

    assert gpu.visible(3, uuids, {}) == [0, 1, 2]
    assert (seen("2,0"), seen(""), seen("GPU-b,1"), seen("1,7,0")) == ([2, 0], [], [2, 1], [1])
