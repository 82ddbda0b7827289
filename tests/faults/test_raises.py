"""A rank raises: its traceback is printed once, with its rank, and all ranks end."""

import re

import pytest

ENDS = "the traceback once, marked with the rank; all ranks end, exit code not 0"


def assert_told_once(ended, rank, words):
    """Checks that the job failed, and that the words stand in one rank's traceback alone."""
    assert ended.returncode != 0
    lines = [line for line in ended.stdout.splitlines() if words in line]
    last = [line for line in lines if re.match(r"\[\d+\] \w+Error: ", line)]
    assert [line.partition(" ")[0] for line in last] == [f"[{rank}]"], ended.stdout


@pytest.mark.fault("user code raises while others wait in a collective", ENDS, within=5)
def test_user_code_raises(job):
    text = """
from keras_dist import collectives
runtime.init()
if runtime.rank() == 1:
    fault()
    raise ValueError("broken on purpose")
collectives.allreduce(1.0)
"""
    ended = job(3, text, bare=True)
    assert_told_once(ended, 1, "broken on purpose")
