"""An HTTP server that strangers cannot make start threads without end. Knows no jobs."""

import threading
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["Server"]

MAX_REQUESTS = 16


class Server(ThreadingHTTPServer):
    """Answers each request in a thread of its own, and some at a time: others are turned away.

    Args:
        address: host and port to listen at.
        handler: the class that answers a request.

    Raises:
        OSError: the port is taken.
        OverflowError: there is no such port.
    """

    request_queue_size = MAX_REQUESTS  # who finds no place there tries again in a second

    def __init__(self, address: tuple[str, int], handler: Any):
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a request, where there is room."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()
