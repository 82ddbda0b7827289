"""scripts/release refuses what would be a wrong release, before it builds anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path):
    """A repository with the script, and version 1.2.3."""
    (tmp_path / "scripts").mkdir()
    for name in ("release", "environment"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "keras_dist").mkdir()
    (tmp_path / "keras_dist" / "_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2030-01-02\n")
    for word in ("init", "add .", "commit --message made"):
        git(tmp_path, *word.split())
    return tmp_path


def git(folder, *words):
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def refused(folder, *words):
    """Returns the error of a release."""
    made = subprocess.run([folder / "scripts/release", *words], capture_output=True, text=True)
    assert made.returncode == 1 and not made.stdout
    return made.stderr


def test_a_tree_with_changes(repository):
    (repository / "new").touch()
    assert "not committed" in refused(repository, "--dry-run", "files")


def test_a_version_without_a_section(repository):
    (repository / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.31] - 2030-01-02\n")
    git(repository, "commit", "--all", "--message", "change")
    assert "CHANGELOG.md has no section [1.2.3]" in refused(repository, "--dry-run", "files")


def test_a_tag_that_exists(repository):
    git(repository, "tag", "v1.2.3")
    assert "the tag v1.2.3 exists" in refused(repository, "--dry-run", "files")


def test_files_of_an_earlier_release(repository, tmp_path_factory):
    assert "exists" in refused(repository, "--dry-run", str(tmp_path_factory.mktemp("files")))


def test_a_release_needs_a_key(repository):
    assert "the file of a key" in refused(repository, "files")
    assert "one directory" in refused(repository, "--dry-run")
