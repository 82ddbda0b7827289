"""IPython's shell inside this process, so that cells use MPI, devices and memory of the rank."""

import os
import sys
from typing import Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from keras_dist.launch.notebook.outputs import Outputs

INLINE = "module://matplotlib_inline.backend_inline"


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
