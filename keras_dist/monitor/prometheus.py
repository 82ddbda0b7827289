"""A job as Prometheus reads it: text format 0.0.4 over HTTP, off unless a port is set.

Requests need a token, which `watching.http` looks at. Counters are given beside shares and
speeds, so that a query may take its own window.
"""

from collections.abc import Callable, Iterator
from urllib.parse import SplitResult

from keras_dist.monitor.http import Handler, Server
from keras_dist.monitor.job import Job, Row

__all__ = ["CONTENT_TYPE", "Endpoint", "to_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Name behind keras_dist_, type, help, the value of a rank.
METRICS: list[tuple[str, str, str, Callable[[Row], float | None]]] = [
    ("epoch", "gauge", "The epoch that a rank is in, from 1.", lambda row: row.report.epoch),
    ("step", "gauge", "The step of the epoch, from 1.", lambda row: row.report.step),
    ("steps_total", "counter", "Steps since the process began.", lambda row: row.report.done),
    (
        "steps_per_second",
        "gauge",
        "Steps in a second, over the last 10 seconds.",
        lambda row: row.report.steps_per_second,
    ),
    (
        "samples_per_second",
        "gauge",
        "Samples of this rank in a second, over the last 10 seconds.",
        lambda row: row.report.samples_per_second,
    ),
    (
        "waiting_ratio",
        "gauge",
        "Share of the last 10 seconds in which a rank waited for others.",
        lambda row: row.report.waiting,
    ),
    (
        "waited_seconds_total",
        "counter",
        "Seconds for which a rank has waited for others.",
        lambda row: row.report.waited_seconds,
    ),
    (
        "memory_bytes",
        "gauge",
        "Resident memory of the process.",
        lambda row: row.report.memory_nbytes,
    ),
    (
        "gpu_use_ratio",
        "gauge",
        "Share of the last moment in which the GPU of a rank computed.",
        lambda row: row.report.gpu.use if row.report.gpu else None,
    ),
    (
        "gpu_memory_bytes",
        "gauge",
        "Memory used on the GPU of a rank.",
        lambda row: row.report.gpu.memory_nbytes if row.report.gpu else None,
    ),
    ("report_age_seconds", "gauge", "Age of what a rank said last.", lambda row: row.age),
]


class Endpoint:
    """The endpoint, in threads of its own.

    Args:
        get_job: gives the job; called at each scrape.
        host: the address to listen at.
        port: its port.
        token: what those must bring who ask.

    Raises:
        OSError: it is taken, or not this node's.
    """

    def __init__(self, get_job: Callable[[], Job], host: str, port: int, token: str):
        fields = {"get_job": staticmethod(get_job), "token": token}
        self._server = Server((host, port), type("_Handler", (_Handler,), fields))
        self._server.begin("keras_dist prometheus")

    def close(self) -> None:
        """Ends it."""
        self._server.close()


def to_text(job: Job) -> str:
    """Returns a job in the text format of Prometheus."""
    return "".join(f"{line}\n" for line in _lines(job))


def _lines(job: Job) -> Iterator[str]:
    def head(name: str, kind: str, text: str) -> Iterator[str]:
        yield f"# HELP keras_dist_{name} {text}"
        yield f"# TYPE keras_dist_{name} {kind}"

    yield from head("ranks", "gauge", "Ranks of the job.")
    yield f"keras_dist_ranks{_labels(job=job.name)} {len(job.rows)}"
    for name, kind, text, value_of in METRICS:
        values = [(row, value_of(row)) for row in job.rows]
        if any(value is not None for _, value in values):
            yield from head(name, kind, text)
            for row, value in values:
                if value is not None:
                    yield f"keras_dist_{name}{_labels(job.name, row)} {_number(value)}"
    if any(row.report.logs for row in job.rows):
        yield from head("logs", "gauge", "What Keras last said of metrics, by name.")
        for row in job.rows:
            for name, value in row.report.logs.items():
                yield f"keras_dist_logs{_labels(job.name, row, metric=name)} {_number(value)}"


def _labels(job: str, row: Row | None = None, **more: str) -> str:
    labels = {"job_name": job}
    if row is not None:
        labels |= {"rank": str(row.report.rank), "host": row.report.host}
    texts = (f'{name}="{_escape(value)}"' for name, value in (labels | more).items())
    return f"{{{','.join(texts)}}}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(value), str(value))


class _Handler(Handler):
    get_job: Callable[[], Job]

    def answer(self, url: SplitResult) -> None:
        if url.path in ("/metrics", "/"):
            self.send(CONTENT_TYPE, to_text(self.get_job()).encode())
        else:
            self.send_error(404)
