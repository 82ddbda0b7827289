"""Where each test runs: the marks of tests/ranks, and what tests/suite.py makes of them."""

import re
import sys

import pytest
import suite


@pytest.mark.parametrize("text", ["", 'pytestmark = pytest.mark.jobs("tensorflow-9")'])
def test_a_file_without_known_jobs_is_an_error(tmp_path, text):
    path = tmp_path / "test_file.py"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"expected pytest\.mark\.jobs"):
        suite.jobs_of(path)


def test_marks_add_jobs():
    assert suite.runs_in("torch-2", ["training", "torch-3"])
    assert suite.runs_in("torch-3", ["training", "torch-3"])
    assert not suite.runs_in("torch-3", ["training"])


OF_JOBS = """
import pathlib, pytest
def fail_once(place):
    if not (ran := pathlib.Path(__file__).with_name(place)).exists():
        ran.touch()
        print(f"the first {place}")
        pytest.fail()
@pytest.fixture
def fails_at_its_end():
    yield
    fail_once("end")
def test_end(fails_at_its_end): pass
def test_call(): fail_once("call")
def test_other(): pass
def test_broken(): pytest.fail()
"""


def test_a_test_that_starts_jobs_gets_a_second_run(capsys, tmp_path):
    (tmp_path / "test_it.py").write_text(OF_JOBS)
    here = ["-c", suite.ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *here, "-p", "conftest", *suite.workers(1)]
    ran = suite.Suite([])
    variables = {"PATH": "", "PYTHONPATH": str(suite.ROOT / "tests")}
    assert ran.run("jobs", [*command, *suite.ONCE_MORE, tmp_path], variables) == 1
    assert ran.end() == 1
    printed = capsys.readouterr().out
    again = [f"{suite.PASSED_AGAIN}test_it.py::{name}\n" for name in ("test_end", "test_call")]
    assert printed.endswith(f"{''.join(again)}3 passed, 1 failed\n")
    assert "\nthe first end\n" in printed
    assert "\nthe first call\n" in printed


def test_an_error_beside_other_parts_is_a_failed_part(capsys):
    def run_jobs():
        sys.exit("no such job")

    ran = suite.Suite([])
    with suite.beside(ran, run_jobs):
        ran.run("others", [sys.executable, "-c", "print('==== 1 passed in 1.0s')"], {})
    assert ran.end() == 1
    printed = capsys.readouterr()
    assert "no such job" in printed.err
    assert re.search(r"\nrun_jobs +FAILED \(SystemExit\)", printed.out)
    assert printed.out.endswith("1 passed, 0 failed\n")


def test_a_path_is_run_where_its_tests_belong(monkeypatch):
    ran = {}

    class Recorder(suite.Suite):
        def run_here(self, name, *arguments, lean=False):
            ran[name] = [*map(str, arguments)]

        def run_job(self, name, tests):
            ran[name] = len([*tests])

    monkeypatch.setattr(suite, "Suite", Recorder)
    monkeypatch.setattr(Recorder, "end", lambda self: 0)
    here, on_ranks = "tests/house/test_suite.py", "tests/ranks/_engine/test_rows.py::test"
    suite.main([here, on_ranks, "-k", "docs"])
    assert ran == {"one process": [here], "tensorflow-2": 1, "openmpi-3": 1}
    ran.clear()
    suite.main(["tests"])
    assert ran["one process"] == ["tests", "--ignore", str(suite.RANKS)]
    assert ran["tensorflow-2"] > 50
    with pytest.raises(SystemExit, match="Received: docs"):
        suite.main(["docs/nothing"])
