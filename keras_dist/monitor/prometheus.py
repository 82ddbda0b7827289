"""Jobs in the text format 0.0.4 of Prometheus, with counters, so that queries choose the window."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keras_dist.monitor.report import Job, Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

JOB = ["job_name", "pid"]  # jobs may have one name; pid is that of rank 0
LABELS = [*JOB, "rank", "host"]

HELP = {
    "epoch": "Current epoch of a rank, from 1.",
    "step": "Current step of the epoch, from 1.",
    "steps": "Steps since the start of the process.",
    "steps_per_second": "Steps per second, over the last 10 seconds.",
    "samples_per_second": "Samples of a rank per second, over the last 10 seconds.",
    "waiting_ratio": "Ratio of the last 10 seconds in which a rank waited for other ranks.",
    "waited_seconds": "Seconds that a rank has waited for other ranks.",
    "memory_bytes": "Resident memory of the process.",
    "gpu_use_ratio": "Utilization of the GPU of a rank.",
    "gpu_memory_bytes": "Memory used on the GPU of a rank.",
    "report_age_seconds": "Age of the latest report of a rank.",
}
COUNTERS = ("steps", "waited_seconds")


def _values(report: Report) -> dict[str, float | None]:
    """Returns the figures of a rank, by their names after `keras_dist_`."""
    gpu = report.gpu
    return {
        "epoch": report.epoch,
        "step": report.step,
        "steps": report.done,
        "steps_per_second": report.steps_per_second,
        "samples_per_second": report.samples_per_second,
        "waiting_ratio": report.waiting,
        "waited_seconds": report.waited_seconds,
        "memory_bytes": report.memory_nbytes,
        "gpu_use_ratio": gpu.use if gpu else None,
        "gpu_memory_bytes": gpu.memory_nbytes if gpu else None,
        "report_age_seconds": report.age,
    }


def to_text(jobs: Sequence[Job]) -> bytes:
    """Returns jobs in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(jobs))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, jobs: Sequence[Job]):
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        ranks = GaugeMetricFamily("keras_dist_ranks", "Ranks of the job.", labels=JOB)
        help_of_logs = "Latest logs of Keras, by name."
        logs = GaugeMetricFamily("keras_dist_logs", help_of_logs, labels=[*LABELS, "metric"])
        figures: dict[str, Any] = {}
        for name, text in HELP.items():
            kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            figures[name] = kind(f"keras_dist_{name}", text, labels=LABELS)
        for job in self._jobs:
            of_job = [job.name, str(job.pid)]
            ranks.add_metric(of_job, len(job.rows))
            for report in job.rows:
                labels = [*of_job, str(report.rank), report.host]
                for name, value in _values(report).items():
                    if value is not None:
                        figures[name].add_metric(labels, value)
                for name, value in report.logs.items():
                    logs.add_metric([*labels, name], value)
        yield ranks
        yield from (family for family in (*figures.values(), logs) if family.samples)
