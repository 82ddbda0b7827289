"""The tables on the pages are those of the registry, and not older than the code they measure."""

import datetime
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
TABLES = tables["TABLES"]
RELEASE = re.compile(r"^## \[(?!Unreleased)", re.MULTILINE)
TOLERATED = 1  # releases between a measurement and a change of the code that it measures


class History:
    """The commits of a repository.

    Args:
        root: its folder.
    """

    def __init__(self, root):
        self._root = root

    def git(self, *arguments):
        """Returns the output of a git command; empty if it fails."""
        command = ["git", "-C", str(self._root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    def missing(self):
        """Returns why there is no history to compare with; `None` if there is."""
        try:
            shallow = self.git("rev-parse", "--is-shallow-repository")
        except FileNotFoundError:
            return "git is not installed"
        return {"false": None, "true": "the clone is shallow"}.get(shallow, "not a git repository")

    def measured_at(self, commit, date):
        """Returns the commit of a table.

        A rebase gives commits other names and leaves their dates: a commit that is not in the
        history is the last one before the table was measured.
        """
        base = self.git("merge-base", commit, "HEAD")
        if base and base == self.git("rev-parse", commit):
            return base
        dated = (line.split() for line in self.git("log", "--format=%at %H").splitlines())
        limit = int(self.seconds(date))
        return next((found for when, found in dated if int(when) <= limit), None)

    def seconds(self, date):
        """Returns a date as seconds since 1970."""
        return datetime.datetime.fromisoformat(date).timestamp() + 60  # it ends at the minute

    def releases(self, commit):
        """Returns how many releases the change log of a commit has."""
        return len(RELEASE.findall(self.git("show", f"{commit}:CHANGELOG.md")))

    def releases_behind(self, commit, date, sources):
        """Returns how many releases before the last change of its code a table was measured."""
        measured = self.measured_at(commit, date)
        if measured is None:
            return None
        changed = self.git("log", "-1", "--format=%H", f"{measured}..HEAD", "--", *sources)
        return self.releases(changed) - self.releases(measured) if changed else 0


def marked():
    """Returns (page, name, match) of all tables on the pages."""
    pages = sorted({table.page for table in TABLES.values()})
    found = ((page, tables["find"]((ROOT / page).read_text())) for page in pages)
    return [(page, name, match) for page, on in found for name, match in on.items()]


def test_every_table_stands_on_its_page():
    assert sorted((page, name) for page, name, _ in marked()) == sorted(
        (table.page, name) for name, table in TABLES.items()
    )
    for page in {table.page for table in TABLES.values()}:
        text = (ROOT / page).read_text()
        count = len(tables["find"](text))
        assert text.count("<!-- table:") == text.count("<!-- end table -->") == count, page


def test_what_tables_measure_exists():
    for name, table in TABLES.items():
        for source in table.sources:
            assert (ROOT / source).exists(), f"{name}: {source}"


def test_no_table_is_more_than_a_release_older_than_its_code():
    history = History(ROOT)
    if reason := history.missing():
        pytest.skip(f"the age of tables is unknown: {reason}")
    old = {}
    for _, name, match in marked():
        behind = history.releases_behind(match["commit"], match["date"], TABLES[name].sources)
        if behind is None or behind > TOLERATED:
            old[name] = match["commit"]
    assert not old, f"measure them again: benchmarks/all {' '.join(old)}"


@pytest.fixture
def repository(tmp_path):
    """A repository with a change log of one release, and a function that commits to it."""

    def commit(when, **texts):
        for name, text in texts.items():
            (tmp_path / name.replace("_md", ".md")).write_text(text)
        for command in (["add", "."], ["commit", "--quiet", "--message", "a change"]):
            settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
            date = f"2026-01-{when:02}T00:00:00+00:00"
            subprocess.run(
                ["git", "-C", str(tmp_path), *settings, *command],
                env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "PATH": "/usr/bin:/bin"},
                check=True,
            )
        return history.git("rev-parse", "HEAD")

    history = History(tmp_path)
    if subprocess.run(["git", "init", "--quiet", str(tmp_path)]).returncode:
        pytest.skip("git is not installed")
    return history, commit


def test_age_is_counted_in_releases_of_the_change_log(repository):
    history, commit = repository
    log = "## [Unreleased]\n## [1.0.0] - 2026-01-01\n"
    first = commit(1, CHANGELOG_md=log, code="1", other="1")
    date = "2026-01-01T12:00+00:00"

    def behind(of=first, at=date):
        return history.releases_behind(of, at, ["code"])

    commit(2, other="2", CHANGELOG_md=log.replace("## [1.0.0]", "## [2.0.0] - x\n## [1.0.0]"))
    commit(3, other="3", CHANGELOG_md="## [3.0.0]\n## [2.0.0]\n## [1.0.0]\n")
    assert behind() == 0  # the code has not changed
    last = commit(4, code="2")
    assert behind() == 2
    assert behind(last) == 0
    assert behind("0123456789") == 2  # as after a rebase: by the date
    assert behind("0123456789", "2026-01-04T00:00+00:00") == 0
    assert behind("0123456789", "2025-01-01T00:00+00:00") is None


def test_tables_are_listed():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "all"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TABLES)
