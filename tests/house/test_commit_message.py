"""`scripts/check-commit-message`: the rules of CONTRIBUTING.md for commit messages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check-commit-message"
BODY = "\n\nWithout it the ranks differ.\n"
# Independent of the user's settings.
GIT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{
        f"GIT_{who}_{what}": "a@b.c"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}


def check(*arguments, cwd=None):
    """Returns exit status and output."""
    ended = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=cwd,
        env=GIT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


@pytest.fixture
def check_message(tmp_path):
    def check_text(message):
        file = tmp_path / "COMMIT_EDITMSG"
        file.write_text(message)
        return check(file)

    return check_text


GOOD = [
    "fix: read the state of the generator" + BODY,
    "feat(torch, tensorflow)!: drop Python 3.10" + BODY,
    "docs(data/tf): explain the shards of a pipeline" + BODY,
    "perf: " + "reduce " * 9 + "in" + "x" + BODY,
    "fix: process what is embedded" + BODY,
    "test: bring the ranks together" + BODY,
    "refactor: embed rows" + BODY,
    "Merge branch 'side'",
    "Merge pull request #12 from someone/side",
    'Revert "fix: read the state of the generator"\n\nThis reverts commit 08438df.',
    "# a comment of git\nfix: add a check" + BODY + "# another one\n",
]
BAD = [
    ("fix: add a check", "no body"),
    ("fix: add a check\n\n# Please enter the commit message", "no body"),
    (f"fix: add a check\n\n# {'-' * 24} >8 {'-' * 24}\ndiff --git a/x b/x", "no body"),
    ("fix: add a check\n\nSigned-off-by: A <a@b.c>", "no body"),
    ("fix: add a check\nWithout it the ranks differ.", "no empty line"),
    ("fix: " + "x" * 68 + BODY, "73 characters"),
    ("fix: add a check." + BODY, "full stop"),
    ("fix: Added a check" + BODY, "'Added' begins no sentence in the imperative"),
    ("fix: adds a check" + BODY, "'adds' begins"),
    ("fix: adding a check" + BODY, "'adding' begins"),
    ("fix: the check is added" + BODY, "'the' begins"),
    ("feature: add a check" + BODY, "with a type of bench build"),
    ("fix add a check" + BODY, "with a type of bench build"),
    ("", "with a type of bench build"),
]


def test_bad_messages_are_told_from_good_ones(check_message):
    for message in GOOD:
        assert check_message(message) == (0, ""), message
    for message, fault in BAD:
        status, printed = check_message(message)
        assert status == 1 and fault in printed, message


@pytest.fixture
def repository(tmp_path):
    """A function that calls git in a new repository."""

    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, env=GIT, check=True)

    git("init", "--quiet")
    return git


def test_without_a_remote_the_newest_commit_is_checked(repository, tmp_path):
    repository("commit", "--quiet", "--allow-empty", "-m", "Adds everything")
    status, printed = check(cwd=tmp_path)
    assert (status, printed.count("no body")) == (1, 1)
    repository("commit", "--quiet", "--allow-empty", "-m", "fix: add a check" + BODY)
    assert check(cwd=tmp_path) == (0, "")


def test_commits_that_the_remote_does_not_have_are_checked(repository, tmp_path):
    repository("commit", "--quiet", "--allow-empty", "-m", "Adds everything")
    repository("update-ref", "refs/remotes/origin/main", "HEAD")
    repository("commit", "--quiet", "--allow-empty", "-m", "wip")
    repository("commit", "--quiet", "--allow-empty", "-m", "fix: add a check" + BODY)
    status, printed = check(cwd=tmp_path)
    assert status == 1
    assert "wip" in printed
    assert "Adds" not in printed


def test_outside_of_a_repository_there_is_nothing_to_check(tmp_path):
    assert check(cwd=tmp_path) == (0, "")
