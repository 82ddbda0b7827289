"""The outputs of cells in the format of notebooks."""

import base64
import io
import json
import re
import threading
from collections.abc import Mapping
from typing import Any, TextIO

import nbformat
from nbformat.v4 import new_output


class Outputs:
    """Collects the outputs of the current cell. Text also goes to a console."""

    def __init__(self, console: TextIO):
        self.lock = threading.RLock()  # any thread may print
        self._console = console
        self._outputs: list[nbformat.NotebookNode] = []
        self._displayed: dict[str, list[nbformat.NotebookNode]] = {}
        self._clears = False

    def begin(self, cell: nbformat.NotebookNode) -> None:
        """Clears a cell and collects its outputs from now on."""
        with self.lock:
            cell.outputs = self._outputs = []
            self._clears = False

    def write(self, name: str, text: str) -> None:
        """Adds text of `"stdout"` or `"stderr"`, which may overwrite the last line."""
        with self.lock:
            self._clear_if_waiting()
            last = self._outputs[-1] if self._outputs else None
            if last is None or last.get("name") != name:
                last = self._add(new_output("stream", name=name, text=""))
            last.text = _apply_carriage_returns(last.text, text)
        self._show(text)

    def display(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None
    ) -> None:
        """Adds a rich output, such as a figure, by MIME type."""
        with self.lock:
            self._clear_if_waiting()
            output = self._add(_rich("display_data", data, metadata))
            if display_id is not None:
                self._displayed.setdefault(display_id, []).append(output)
        self._show_plain(data)

    def update(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str) -> None:
        """Updates the rich outputs of a display id, also in earlier cells."""
        with self.lock:
            for output in self._displayed.get(display_id, []):
                output.update(_rich("display_data", data, metadata))

    def result(self, data: Mapping[str, Any], metadata: Mapping[str, Any], count: int) -> None:
        """Adds the value of the cell's last expression."""
        with self.lock:
            self._clear_if_waiting()
            self._add(_rich("execute_result", data, metadata, execution_count=count))
        self._show_plain(data)

    def error(self, name: str, text: str, traceback: list[str]) -> None:
        """Adds an exception."""
        with self.lock:
            self._clear_if_waiting()
            self._add(new_output("error", ename=name, evalue=text, traceback=traceback))
        self._show("\n".join([*traceback, ""]))

    def clear(self, wait: bool) -> None:
        """Clears the outputs of the cell, now or at the next output."""
        with self.lock:
            self._clears = True
            if not wait:
                self._clear_if_waiting()

    def _add(self, output: nbformat.NotebookNode) -> nbformat.NotebookNode:
        self._outputs.append(output)
        return output

    def _clear_if_waiting(self) -> None:
        if self._clears:
            self._outputs.clear()
            self._clears = False

    def _show_plain(self, data: Mapping[str, Any]) -> None:
        if "text/plain" in data:
            self._show(f"{data['text/plain']}\n")

    def _show(self, text: str) -> None:
        self._console.write(text)
        self._console.flush()


class Stream(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr` while cells run."""

    encoding = "utf-8"

    def __init__(self, name: str, outputs: Outputs, file: TextIO):
        self._name, self._outputs, self._file = name, outputs, file

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._outputs.write(self._name, text)
        return len(text)

    def fileno(self) -> int:
        return self._file.fileno()


def _apply_carriage_returns(before: str, text: str) -> str:
    """Appends text, where a carriage return restarts the line."""
    head, newline, line = before.rpartition("\n")
    return head + newline + re.sub(r"[^\n]*\r(?=[^\r\n])", "", (line + text).replace("\r\n", "\n"))


def _rich(
    kind: str, data: Mapping[str, Any], metadata: Mapping[str, Any], **more: Any
) -> nbformat.NotebookNode:
    content = {name: _as_json(value) for name, value in data.items()}
    return new_output(kind, data=content, metadata=_as_json(dict(metadata)), **more)


def _as_json(value: Any) -> Any:
    """Converts data to JSON: bytes of images become base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return json.loads(json.dumps(value, default=repr))
