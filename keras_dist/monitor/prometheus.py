"""The endpoint that Prometheus scrapes: text format 0.0.4 over HTTP, off unless a port is set.

Requests need a token, which `monitor.http` checks. Counters accompany ratios and rates, so
that a query can use another window.
"""

from collections.abc import Callable, Iterator
from urllib.parse import SplitResult

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keras_dist.monitor.http import Handler, Server
from keras_dist.monitor.job import Job, Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = ["job_name", "rank", "host"]

# The name after keras_dist_, the type, the help, and the value of a rank.
METRICS: list[tuple[str, type, str, Callable[[Row], float | None]]] = [
    ("epoch", GaugeMetricFamily, "Current epoch of a rank, from 1.", lambda row: row.report.epoch),
    ("step", GaugeMetricFamily, "Current step of the epoch, from 1.", lambda row: row.report.step),
    (
        "steps",
        CounterMetricFamily,
        "Steps since the start of the process.",
        lambda row: row.report.done,
    ),
    (
        "steps_per_second",
        GaugeMetricFamily,
        "Steps per second, over the last 10 seconds.",
        lambda row: row.report.steps_per_second,
    ),
    (
        "samples_per_second",
        GaugeMetricFamily,
        "Samples of a rank per second, over the last 10 seconds.",
        lambda row: row.report.samples_per_second,
    ),
    (
        "waiting_ratio",
        GaugeMetricFamily,
        "Ratio of the last 10 seconds in which a rank waited for other ranks.",
        lambda row: row.report.waiting,
    ),
    (
        "waited_seconds",
        CounterMetricFamily,
        "Seconds that a rank has waited for other ranks.",
        lambda row: row.report.waited_seconds,
    ),
    (
        "memory_bytes",
        GaugeMetricFamily,
        "Resident memory of the process.",
        lambda row: row.report.memory_nbytes,
    ),
    (
        "gpu_use_ratio",
        GaugeMetricFamily,
        "Utilization of the GPU of a rank.",
        lambda row: row.report.gpu.use if row.report.gpu else None,
    ),
    (
        "gpu_memory_bytes",
        GaugeMetricFamily,
        "Memory used on the GPU of a rank.",
        lambda row: row.report.gpu.memory_nbytes if row.report.gpu else None,
    ),
    (
        "report_age_seconds",
        GaugeMetricFamily,
        "Age of the latest report of a rank.",
        lambda row: row.age,
    ),
]


class Endpoint:
    """The HTTP endpoint of a job, served by threads of its own."""

    def __init__(self, get_job: Callable[[], Job], host: str, port: int, token: str):
        fields = {"get_job": staticmethod(get_job), "token": token}
        self._server = Server((host, port), type("_Handler", (_Handler,), fields))
        self._server.start("keras_dist prometheus")

    def close(self) -> None:
        """Stops serving."""
        self._server.close()


def _to_text(job: Job) -> bytes:
    """Returns a job in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(job))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, job: Job):
        self._job = job

    def collect(self) -> Iterator[Metric]:
        job = self._job
        ranks = GaugeMetricFamily("keras_dist_ranks", "Ranks of the job.", labels=["job_name"])
        ranks.add_metric([job.name], len(job.rows))
        yield ranks
        for name, kind, text, value_of in METRICS:
            family = kind(f"keras_dist_{name}", text, labels=LABELS)
            for row in job.rows:
                if (value := value_of(row)) is not None:
                    family.add_metric(_labels(job, row), value)
            if family.samples:
                yield family
        logs = GaugeMetricFamily(
            "keras_dist_logs", "Latest logs of Keras, by name.", labels=[*LABELS, "metric"]
        )
        for row in job.rows:
            for name, value in row.report.logs.items():
                logs.add_metric([*_labels(job, row), name], value)
        if logs.samples:
            yield logs


def _labels(job: Job, row: Row) -> list[str]:
    return [job.name, str(row.report.rank), row.report.host]


class _Handler(Handler):
    get_job: Callable[[], Job]

    def answer(self, url: SplitResult) -> None:
        if url.path in ("/metrics", "/"):
            self.send(CONTENT_TYPE, _to_text(self.get_job()))
        else:
            self.send_error(404)
