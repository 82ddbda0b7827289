"""A callback that posts the progress of training to Kubeflow Trainer."""

import datetime
import json
import logging
import os
import ssl
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import runtime
from keras_dist.training.session_callback import SessionCallback

PAUSE_SECONDS = 5.0  # between two requests, as Kubeflow asks
REQUEST_SECONDS = 5.0

_log = logging.getLogger("keras_dist")


class ProgressCallback(SessionCallback):
    """Posts progress, remaining time and metrics to the status of a TrainJob of Kubeflow Trainer.

    The root posts at most every 5 seconds, from a thread of its own, to the address in
    `KUBEFLOW_TRAINER_SERVER_URL`, which Kubeflow Trainer sets with its feature `TrainJobStatus`.
    Without it nothing is posted. A request that fails is logged once and changes nothing else.

    Example:
    ```python
    import keras_dist.kubernetes

    progress = keras_dist.kubernetes.ProgressCallback()
    model.fit(dataset, epochs=2, callbacks=keras_dist.callbacks(progress))
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._url = os.environ.get("KUBEFLOW_TRAINER_SERVER_URL") if runtime.rank() == 0 else None
        self._threads = ThreadPoolExecutor(1, "keras_dist progress")
        self._request: Future[None] | None = None
        self._has_failed = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._began, self._next_post = time.monotonic(), 0.0
        self._first: int | None = None
        self._last_logs: dict[str, Any] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch; a resumed fit does not begin with the first one."""
        self._epoch = epoch
        self._first = epoch if self._first is None else self._first

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Posts the progress within an epoch, if the number of steps is known."""
        if self.params.get("steps"):
            self._post(self._epoch + (batch + 1) / self.params["steps"])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Posts the progress with the metrics of the epoch, which later posts repeat."""
        self._last_logs = logs or {}
        self._post(epoch + 1.0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Posts the end of training, and waits for the request."""
        self._finish_request()
        self._next_post, self._last_logs = 0.0, logs or self._last_logs
        self._post(self.params["epochs"])
        self._finish_request()

    def _finish_request(self) -> None:
        if self._request is not None:
            self._request.result()

    def _post(self, done: float) -> None:
        """Posts the number of epochs that are done, unless a request is young or under way."""
        now, epochs = time.monotonic(), self.params["epochs"]
        is_busy = self._request is not None and not self._request.done()
        if self._url is None or is_busy or now < self._next_post:
            return
        self._next_post = now + PAUSE_SECONDS
        seconds_per_epoch = (now - self._began) / max(done - (self._first or 0), 1e-9)
        status = {
            "progressPercentage": min(100, int(100 * done / max(epochs, 1))),
            "estimatedRemainingSeconds": max(0, round(seconds_per_epoch * (epochs - done))),
            "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(),
            "metrics": [
                {"name": name, "value": f"{float(value):g}"}
                for name, value in self._last_logs.items()
                if np.ndim(value) == 0
            ],
        }
        self._request = self._threads.submit(self._send, json.dumps({"trainerStatus": status}))

    def _send(self, body: str) -> None:
        try:
            # Kubernetes replaces the token while the job runs.
            token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            trusted = ssl.create_default_context(
                cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"]
            )
            request = urllib.request.Request(str(self._url), body.encode(), headers)
            urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=trusted).close()
        except Exception as error:  # training matters more
            if not self._has_failed:
                _log.warning("The progress could not be posted to %s: %s", self._url, error)
            self._has_failed = True
