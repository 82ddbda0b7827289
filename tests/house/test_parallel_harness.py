"""The conftest of the parallel tests, on two ranks with sample tests."""

import re
import shutil
import textwrap
from pathlib import Path

import pytest
import suite

HARNESS = Path(__file__).parents[1] / "ranks" / "conftest.py"


@pytest.fixture
def run_tests(run_ranks, tmp_path):
    """A function that runs a test module on two ranks; returns status and output."""

    def run(source):
        shutil.copy(HARNESS, tmp_path)
        head = "import pytest\nimport time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        (tmp_path / "test_it.py").write_text(head + textwrap.dedent(source))
        options = ("-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", "/dev/null")
        ended = run_ranks(2, "-m", "pytest", *options, tmp_path, cwd=tmp_path)
        return ended.returncode, ended.stdout

    return run


def test_ranks_report_as_one(run_tests):
    status, output = run_tests("""
        import os
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

        def test_leaves_a_variable():
            if rank == 1:
                os.environ["KERAS_DIST_VERBOSE"] = "left"

        def test_passes_after_all_that():
            assert (os.environ.get("KERAS_DIST_VERBOSE") == "left") == (rank == 1)
            MPI.COMM_WORLD.Barrier()
    """)
    assert status not in (0, 124), output
    assert output.count("test session starts") == 1
    assert re.search(r"=+ 4 failed, 5 passed, 1 skipped, 2 errors in", output), output
    assert "[rank 0 of 2] passed\n" in output
    assert re.search(r"\[rank 1 of 2\] failed\n(.*\n)*E +AssertionError: wrong answer", output)
    assert "said by rank 1" in output
    assert "[rank 0, 1 of 2] failed\n" in output
    assert re.search(r"\[rank 0 of 2\] skipped\n.*nothing to do", output)
    assert re.search(r"\[rank 0 of 2\] failed\n(.*\n)*E +AssertionError: no fixture", output)
    assert "ERROR test_it.py::test_leaves_a_variable" in output, output
    assert "'KERAS_DIST_VERBOSE': 'left'" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (
            """
            def sleep_for_ever():
                while True:
                    time.sleep(1)

            @pytest.mark.limit(5)
            def test_one_rank_sleeps():
                if rank == 1:
                    sleep_for_ever()
            """,
            [
                *(f"[rank {n} of 2] test_it.py::test_one_rank_sleeps takes longer" for n in (0, 1)),
                *("than 5 seconds", "in sleep_for_ever", "in exchange"),
            ],
        ),
        (
            """
            @pytest.mark.limit(5)
            def test_one_rank_leaves():
                assert rank != 1, "left early"
                MPI.COMM_WORLD.Barrier()
            """,
            ["[rank 1 of 2]", "AssertionError: left early", "in test_one_rank_leaves"],
        ),
        (
            """
            import ctypes

            @pytest.mark.limit(1)
            def test_holds_the_interpreter():
                ctypes.PyDLL(None).sleep(1000)
            """,
            ["in test_holds_the_interpreter"],
        ),
        (
            """
            def test_everywhere():
                pass

            if rank == 1:
                def test_only_here():
                    pass
            """,
            ["[rank 1 of 2]\n", "test_only_here"],
        ),
        (
            """
            if rank == 1:
                raise ImportError("not on this node")

            def test_everywhere():
                pass
            """,
            ["[rank 1 of 2]\n", "ImportError: not on this node"],
        ),
        (
            """
            def test_leaves():
                if rank == 1:
                    pytest.exit("enough")

            def test_next():
                pass
            """,
            ["[rank 1 of 2] The ranks have lost each other"],
        ),
    ],
    ids="sleeps|waits|holds the interpreter|other tests|an import fails|leaves".split("|"),
)
def test_a_job_whose_ranks_do_not_meet_ends_and_says_why(run_tests, source, printed):
    status, output = run_tests(source)
    assert status != 0
    assert not [text for text in printed if text not in output], output
    assert "1 passed" not in output


def test_slow_tests_on_ranks_are_run_by_the_suite():
    slow = {path for path in suite.rank_files() if "mark.slow" in path.read_text()}
    assert slow <= set(suite.files_of("torch-3")) and not suite.JOBS["torch-3"].marked
