"""Cached copies of `data.cached` that other users made or changed."""

import os

import pytest

from keras_dist.storage.ownership import private_name

STRANGER = 54321  # as in reading.py


def run(job, tmp_path, damage):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "1").write_text("one")
    places = {"SOURCE": str(tmp_path / "tree"), "CACHE": str(tmp_path / "cache")}
    return job(2, "reading.py", "changed_copy", damage, **places)


@pytest.mark.fault(
    "a copy of `data.cached` belongs to another user, or is a link",
    "an error on every rank that names the owner",
    within=10,
)
@pytest.mark.parametrize("what", ["a link", "of another user"])
def test_what_is_in_the_cache_is_not_ones_own(job, tmp_path, what):
    if what == "of another user" and os.getuid() != 0:
        pytest.skip("NOT TESTED: files of another user; only root can make them")
    whose = "one of user " if what == "a link" else f"one of user uid {STRANGER}, mode -rw"
    ended = run(job, tmp_path, what)
    assert ended.returncode != 0
    for rank in range(2):
        words = f"[{rank}] keras_dist.errors.DataError: [rank 0 of 2] on {os.uname().nodename}"
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith(words)]
        assert whose in line and f"remove {tmp_path / 'cache' / private_name()}" in line


@pytest.mark.fault(
    "a copy of `data.cached` is changed by another program",
    "it is copied again, with a warning",
    within=10,
)
def test_what_is_in_the_cache_has_changed(job, tmp_path):
    printed = run(job, tmp_path, "changed").succeeded()
    assert printed.count("turn 1: one") == 2
    assert "has changed since it was copied" in printed
