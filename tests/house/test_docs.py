"""The code on the pages runs, and the API pages have every public name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from start_jobs import HANG_SECONDS

from keras_dist import config

ROOT = pages.ROOT


@pytest.mark.slow
def test_python_on_the_pages_and_in_docstrings_runs(run_ranks, tmp_path):
    ended = run_ranks(2, Path(pages.__file__), cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-5000:]
    texts = [*((path, path.read_text()) for path in pages.pages()), *pages.docstrings()]
    expected = [str(path) for path, text in texts if pages.pieces(text)]
    assert [file.read_text().split() for file in tmp_path.glob("ran-*")] == [expected, expected]


@pytest.mark.slow
def test_python_that_starts_ranks_runs(tmp_path):
    found = [
        (path, code)
        for path in pages.pages()
        for _, code in pages.pieces(path.read_text())
        if pages.place(code) == "outside"
    ]
    for path, code in found:
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=HANG_SECONDS)
        assert ended.returncode == 0, path


def test_what_runs_is_found():
    text = """
<!-- python
size = 1
-->
| Horovod | keras_dist | what differs |
|---|---|---|
| `hvd.rank()` | `rank()` `size()` | `nothing` |

```diff
-old()
+new()
```

```sh
size
```
"""
    found = [(3, "size = 1\n"), (7, "rank()"), (7, "size()"), (10, "\nnew()\n")]
    assert pages.pieces(text) == found
    assert pages.place("size") == "on ranks"
    assert pages.place("keras_dist.run(size)") == "outside"
    assert pages.place("def size():\n    ...\nkeras_dist.run(size)") == "nowhere"


def test_variables_on_the_pages_are_known():
    known = {variable.name for variable in config.VARIABLES}
    for path in pages.pages():
        unknown = set(re.findall(r"KERAS_DIST_\w*[A-Z]", path.read_text())) - known
        assert not unknown, f"{path}: {unknown}"


def test_every_public_name_is_on_a_page_of_the_api():
    shown = [
        name
        for page in ROOT.glob("docs/api/*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    missing = set(public_names()) - set(shown)
    assert not missing, f"docs/api/: add `::: {sorted(missing)[0]}` to a page, and {missing}"
    assert len(shown) == len(set(shown)), "a name stands twice"


def public_names():
    """Yields the dotted public names, which API pages link."""
    package = ROOT / "keras_dist"
    for name in names_in(package / "__init__.py"):
        yield f"keras_dist.{name}"
        for room in (package / name / "__init__.py", package / f"{name}.py"):
            if room.exists():
                yield from (f"keras_dist.{name}.{inside}" for inside in names_in(room))


def names_in(path):
    stub = path.with_suffix(".pyi")
    if stub.exists():
        imported = ast.parse(stub.read_text()).body
        return sorted(alias.name for node in imported for alias in node.names)
    found = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
    return ast.literal_eval(found[1])
