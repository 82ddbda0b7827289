"""IPython's shell in the process of a rank, and the outputs of cells in the format of notebooks."""

import base64
import io
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn, TextIO

import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_output
from traitlets import Type
from traitlets.config import Config

INLINE = "module://matplotlib_inline.backend_inline"


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
            self._add(_rich("execute_result", data, metadata, execution_count=count))
        self._show_plain(data)

    def error(self, name: str, text: str, traceback: list[str]) -> None:
        """Adds an exception."""
        with self.lock:
            self._add(new_output("error", ename=name, evalue=text, traceback=traceback))
        self._show("\n".join([*traceback, ""]))

    def clear(self, wait: bool) -> None:
        """Clears the outputs of the cell, now or at the next output."""
        with self.lock:
            self._clears = True
            if not wait:
                self._clear_if_waiting()

    def _add(self, output: nbformat.NotebookNode) -> nbformat.NotebookNode:
        self._clear_if_waiting()
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


class _LastValue(DisplayHook):
    """Passes the value of the last expression of a cell to its outputs."""

    shell: Any

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.outputs.result(format_dict, md_dict or {}, self.prompt_count)

    def finish_displayhook(self) -> None:
        self._is_active = False


class _Displays(DisplayPublisher):
    """Passes displayed objects to the outputs of the cell."""

    shell: Any

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        display_id = (transient or {}).get("display_id")
        if update:
            self.shell.outputs.update(data, metadata or {}, display_id)
        else:
            self.shell.outputs.display(data, metadata or {}, display_id)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.outputs.clear(wait)


class Shell(InteractiveShell):
    """Runs cells as a kernel does, and passes results to `outputs`."""

    displayhook_class = Type(_LastValue)
    display_pub_class = Type(_Displays)

    outputs: Outputs

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.outputs.error(etype.__name__, str(evalue), stb)

    def show_usage_error(self, exc: Any) -> None:
        self.outputs.error("UsageError", str(exc), [f"UsageError: {exc}"])

    def enable_gui(self, gui: Any = None) -> None:
        """Accepts the request of `%matplotlib inline` for no event loop."""

    def ask_exit(self) -> NoReturn:
        """Ends the notebook when a cell calls `exit`."""
        raise SystemExit


def start_shell(outputs: Outputs) -> Shell:
    """Starts the shell of this process, with inline figures of matplotlib."""
    os.environ.setdefault("MPLBACKEND", INLINE)
    config = Config()
    config.HistoryManager.enabled = False  # all ranks would share one file in the home directory
    config.InteractiveShell.colors = "nocolor"
    shell = Shell.instance(config=config)
    shell.outputs = outputs
    sys.path.insert(0, "")
    return shell
