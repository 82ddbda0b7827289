"""The conftest of the parallel tests, on two ranks with sample tests."""

import json
import re
import shutil
import textwrap
import time
from pathlib import Path

import pytest
import suite

HARNESS = Path(__file__).parents[1] / "ranks" / "conftest.py"


@pytest.fixture
def run_tests(run_ranks, tmp_path):
    """A function that runs a test module on two ranks; returns status, output and seconds."""

    def run(source):
        shutil.copy(HARNESS, tmp_path)
        head = "import pytest\nimport time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        (tmp_path / "test_it.py").write_text(head + textwrap.dedent(source))
        began = time.monotonic()
        options = ("-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", "/dev/null")
        ended = run_ranks(2, "-m", "pytest", *options, tmp_path, cwd=tmp_path)
        return ended.returncode, ended.stdout, time.monotonic() - began

    return run


def test_one_report_and_success_when_all_ranks_pass(run_tests):
    status, output, _ = run_tests("""
        import random

        seen = []

        def test_directory_is_shared_and_fresh(shared_tmp_path):
            seen.append(shared_tmp_path)
            assert len(set(MPI.COMM_WORLD.allgather(str(shared_tmp_path)))) == 1
            assert shared_tmp_path.is_dir() and not list(shared_tmp_path.iterdir())

        def test_directory_is_removed():
            assert not seen[0].exists()

        def test_random_numbers_agree():
            assert len(set(MPI.COMM_WORLD.allgather(random.random()))) == 1

        def test_skipped_everywhere():
            pytest.skip("no rank can do this")
    """)
    assert status == 0, output
    assert output.count("test session starts") == 1
    assert re.search(r"=+ 3 passed, 1 skipped in", output)


def test_verdict_is_shared(run_tests):
    status, output, _ = run_tests("""
        @pytest.fixture
        def broken_on_rank_0():
            assert rank != 0, "no fixture here"

        def test_fails_on_rank_1():
            print("said by rank", rank)
            assert rank != 1, "wrong answer"

        def test_fails_on_both():
            assert False, "wrong everywhere"

        def test_skipped_on_rank_0():
            if rank == 0:
                pytest.skip("nothing to do")

        @pytest.mark.xfail(strict=False)
        def test_expected_to_fail_but_not_on_rank_1():
            assert rank == 1

        def test_with_fixture(broken_on_rank_0):
            pass

        def test_passes_after_all_that():
            MPI.COMM_WORLD.Barrier()
    """)
    assert status not in (0, 124), output
    assert re.search(r"=+ 4 failed, 1 passed, 1 error in", output), output
    assert "[rank 0 of 2] passed\n" in output
    assert re.search(r"\[rank 1 of 2\] failed\n(.*\n)*E +AssertionError: wrong answer", output)
    assert "said by rank 1" in output
    assert "[rank 0, 1 of 2] failed\n" in output
    assert re.search(r"\[rank 0 of 2\] skipped\n.*nothing to do", output)
    assert re.search(r"\[rank 0 of 2\] failed\n(.*\n)*E +AssertionError: no fixture", output)


def test_limit_shows_where_every_rank_stands(run_tests):
    status, output, seconds = run_tests("""
        def sleep_for_ever():
            while True:
                time.sleep(1)

        @pytest.mark.limit(1)
        def test_sleeps():
            if rank == 1:
                sleep_for_ever()
    """)
    assert status != 0
    assert seconds < 30
    for rank in 0, 1:
        assert (
            f"[rank {rank} of 2] test_it.py::test_sleeps takes longer than 1 seconds" in output
        ), output
    assert "in sleep_for_ever" in output
    assert "in exchange" in output


def test_limit_shows_the_failure_that_the_others_wait_for(run_tests):
    status, output, seconds = run_tests("""
        @pytest.mark.limit(1)
        def test_one_rank_leaves():
            assert rank != 1, "left early"
            MPI.COMM_WORLD.Barrier()
    """)
    assert status != 0
    assert seconds < 30
    assert "[rank 1 of 2]" in output
    assert "AssertionError: left early" in output, output
    assert "in test_one_rank_leaves" in output


def test_limit_strikes_a_rank_that_holds_the_interpreter(run_tests):
    status, output, seconds = run_tests("""
        import ctypes

        @pytest.mark.limit(1)
        def test_holds_the_interpreter():
            ctypes.PyDLL(None).sleep(100)
    """)
    assert status != 0
    assert seconds < 60
    assert "in test_holds_the_interpreter" in output, output


def test_ranks_that_collect_different_tests_stop(run_tests):
    status, output, _ = run_tests("""
        def test_everywhere():
            pass

        if rank == 1:
            def test_only_here():
                pass
    """)
    assert status != 0
    assert re.search(r"\[rank 1 of 2\]\n.*test_only_here", output), output
    assert "passed" not in output


def test_error_while_importing_on_one_rank_stops_all(run_tests):
    status, output, _ = run_tests("""
        if rank == 1:
            raise ImportError("not on this node")

        def test_everywhere():
            pass
    """)
    assert status != 0
    assert re.search(r"\[rank 1 of 2\]\n(.*\n)*.*ImportError: not on this node", output), output


def test_what_a_test_leaves_to_others_is_its_failure(run_tests):
    status, output, _ = run_tests("""
        import os

        def test_leaves():
            if rank == 1:
                os.environ["KERAS_DIST_VERBOSE"] = "left"

        def test_next():
            assert (os.environ.pop("KERAS_DIST_VERBOSE", "") == "left") == (rank == 1)
    """)
    assert status != 0
    assert "ERROR test_it.py::test_leaves" in output, output
    assert "'KERAS_DIST_VERBOSE': 'left'" in output, output


def test_rank_that_leaves_the_session_ends_the_job(run_tests):
    status, output, seconds = run_tests("""
        def test_leaves():
            if rank == 1:
                pytest.exit("enough")

        def test_next():
            pass
    """)
    assert status != 0
    assert seconds < 30
    assert "[rank 1 of 2] The ranks have lost each other" in output, output


def test_rows_of_tables_and_differences_are_recorded(run_tests, tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_RECORDS", str(tmp_path))
    run_tests("""
        import sys
        import types

        backend = types.SimpleNamespace(backend=lambda: "one of them")
        seed = types.SimpleNamespace(set_random_seed=lambda seed: None)
        policy = types.SimpleNamespace(name="float32")
        config = types.SimpleNamespace(floatx=lambda: "float32", dtype_policy=lambda: policy)
        sys.modules["keras"] = types.SimpleNamespace(backend=backend, utils=seed, config=config)

        @pytest.mark.parity("row of {what}")
        @pytest.mark.parametrize("what", ["one", "two"])
        def test_row(what):
            if what == "two":
                pytest.skip("no")

        @pytest.mark.parity("row of one")
        def test_fails_on_rank_1():
            assert rank != 1

        @pytest.mark.parity("row of two")
        @pytest.mark.skipif(True, reason="not here")
        def test_skipped():
            pass

        def test_of_no_row():
            pass

        @pytest.mark.exactness("row of one")
        def test_sees_a_difference(record_property):
            record_property("difference", (0.5, ["row of one"]))
    """)
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text()) == {
        "backend": "one of them",
        "ranks": 2,
        "exactness": {"row of one": {"test_it.py::test_sees_a_difference": "passed"}},
        "difference": [[0.5, ["row of one"]]],
        "parity": {
            "row of one": {
                "test_it.py::test_row[one]": "passed",
                "test_it.py::test_fails_on_rank_1": "failed",
            },
            "row of two": {
                "test_it.py::test_row[two]": "Skipped: no",
                "test_it.py::test_skipped": "Skipped: not here",
            },
        },
    }


def test_slow_tests_on_ranks_are_run_by_the_suite():
    slow = {path for path in suite.rank_files() if "mark.slow" in path.read_text()}
    assert slow <= set(suite.files_of("torch-3")) and not suite.JOBS["torch-3"].marked
