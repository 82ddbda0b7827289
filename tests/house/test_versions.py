"""What is deprecated says until when, on docs/versions.md as well, and is gone by then."""

import ast
import re

from test_docs import ROOT

from keras_dist._version import __version__

PAGE = (ROOT / "docs" / "versions.md").read_text()
LISTED = dict(re.findall(r"^\| `(\w+)=?`[^|]*\|[^|]*\| ([\d.]+) \|$", PAGE, re.MULTILINE))


def sources():
    return {path: path.read_text() for path in (ROOT / "keras_dist").rglob("*.py")}


def numbers(version):
    """Returns the numbers of a version, such as 1.0.0rc1, that count in an order of releases."""
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups()))


def test_deprecated_arguments_say_until_when():
    found = {}
    for path, text in sources().items():
        for name, rest in re.findall(r"^ +(\w+): deprecated(.*)$", text, re.MULTILINE):
            until = re.match(r", until ([\d.]+): ", rest)
            assert until, f"{path}: {name}: deprecated, until which version?"
            found[name] = until[1]
    assert found == LISTED


def test_warnings_of_deprecation_have_one_form():
    calls = [
        f"{path.name}: {ast.unparse(node)}"
        for path, text in sources().items()
        if "DeprecationWarning" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and "DeprecationWarning" in map(ast.unparse, node.args)
    ]
    assert calls == ["arguments.py: warnings.warn(text, DeprecationWarning, stacklevel=level + 1)"]


def test_what_is_deprecated_leaves_with_its_version():
    left = {name: until for name, until in LISTED.items() if numbers(until) <= numbers(__version__)}
    assert not left, "remove what this version promised to remove"
