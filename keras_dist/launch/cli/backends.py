"""The backends of Keras: those that are installed here, and the one that Keras selects."""

import contextlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

#: by name: the packages that may have it
BACKENDS = {"tensorflow": ("tensorflow", "tensorflow-cpu"), "jax": ("jax",), "torch": ("torch",)}


def installed() -> dict[str, str]:
    """Returns the versions of the installed backends, by name."""
    found = {name: version(packages) for name, packages in BACKENDS.items()}
    return {name: text for name, text in found.items() if text is not None}


def wanted(environment: Mapping[str, str]) -> str:
    """Returns the backend that Keras selects, from the environment or its configuration file."""
    if name := environment.get("KERAS_BACKEND"):
        return name
    file = Path(environment.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(json.loads(file.read_text()).get("backend", "tensorflow"))
    return "tensorflow"


def remedy(missing: str) -> str:
    """Returns what to do if the backend that Keras selects is not installed."""
    ways = [f"pip install 'keras_dist[{missing}]'"] if missing in BACKENDS else []
    ways += [f"set KERAS_BACKEND={name}" for name in installed() or BACKENDS]
    return f"{', or '.join(ways)}."


def version(packages: tuple[str, ...]) -> str | None:
    """Returns the version of the first installed package."""
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None
