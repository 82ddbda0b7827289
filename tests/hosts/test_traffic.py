"""The traffic between two hosts: only the slices of a reduction cross the network, compressed."""

import re
import sys

import pytest
from start_jobs import SCRIPTS


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_the_traffic_of_a_reduction(run_on_hosts):
    job = run_on_hosts(sys.executable, 2, SCRIPTS / "traffic.py")
    assert job.returncode == 0, job.stdout
    told = re.findall(r"(\w+): 2 of 4 ranks on a node, right=True, nbytes=(\d+)", job.stdout)
    nbytes = {name: int(count) for name, count in told}
    assert set(nbytes) == {"none", "fp16"}, job.stdout
    # A node sends half of its sum and half of the result, plus TCP headers.
    assert 4e6 <= nbytes["none"] < 4.4e6
    assert 2e6 <= nbytes["fp16"] < 2.2e6
