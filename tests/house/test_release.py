"""scripts/release refuses what would be a wrong release, and signs and tags a right one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What builds and installs, which scripts/package does as well, stands for itself.
STANDS_IN = {
    "environment": """
cd "$(dirname "${BASH_SOURCE[0]}")/.."
check_python() { :; }
site_packages() { echo "$1"; }
install() {
    mkdir -p "$1/bin"
    echo '#!/bin/sh' >"$1/bin/python"
    cat >"$1/bin/cyclonedx-py" <<'EOF'
#!/bin/sh
while [ "$1" != --output-file ]; do shift; done
echo '{"name": "keras_dist"}' >"$2"
EOF
    chmod +x "$1"/bin/*
}
""",
    "package": """#!/bin/sh
mkdir "$1"
echo wheel >"$1/keras_dist-1.2.3-py3-none-any.whl"
echo sdist >"$1/keras_dist-1.2.3.tar.gz"
""",
}


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


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        ("touch new", "--dry-run files", "not committed"),
        ("sed -i s/1.2.3/1.2.31/ CHANGELOG.md", "--dry-run files", "has no section [1.2.3]"),
        ("git tag v1.2.3", "--dry-run files", "the tag v1.2.3 exists"),
        ("true", "--dry-run scripts", "exists"),  # as of an earlier release
        ("true", "files", "the file of a key"),
        ("true", "--dry-run", "one directory"),
    ],
)
def test_a_wrong_release_is_refused(repository, change, words, expected):
    subprocess.run(change.split(), cwd=repository, check=True)
    if "CHANGELOG" in change:
        git(repository, "commit", "--all", "--message", "change")
    command = [repository / "scripts/release", *words.split()]
    made = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert made.returncode == 1 and not made.stdout
    assert expected in made.stderr


# --- A release


@pytest.fixture
def released(repository, tmp_path_factory):
    """A function that makes a release; returns the folder with its files, the tags, the output."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("NOT TESTED: signatures; there is no ssh-keygen")
    for name, text in STANDS_IN.items():
        (repository / "scripts" / name).write_text(text)
        (repository / "scripts" / name).chmod(0o755)
    git(repository, "add", ".")
    git(repository, "commit", "--message", "stand in")
    who = {"GIT_COMMITTER_NAME": "tests", "GIT_COMMITTER_EMAIL": "tests@localhost"}
    options = {"env": {**os.environ, **who, "PYTHON": "true"}, "capture_output": True, "text": True}

    def make(*words):
        files = tmp_path_factory.mktemp("release") / "files"
        made = subprocess.run([repository / "scripts/release", *words, files], **options)
        assert made.returncode == 0, made.stdout + made.stderr
        tags = subprocess.run(["git", "tag"], cwd=repository, **options).stdout.split()
        return files, tags, made.stdout

    return make


FILES = {
    "SHA256SUMS",
    "SHA256SUMS.sig",
    "keras_dist-1.2.3-py3-none-any.whl",
    "keras_dist-1.2.3.cdx.json",
    "keras_dist-1.2.3.tar.gz",
}


def test_a_dry_run_makes_all_files_and_no_tag(released):
    files, tags, said = released("--dry-run")
    assert {path.name for path in files.iterdir()} == FILES
    assert 'Good "file" signature for keras_dist' in said
    assert "git tag --annotate v1.2.3" in said and not tags


def test_a_release_is_tagged_and_verified_by_the_public_key(released, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "key"], check=True)
    files, tags, _ = released("--key", keys / "key")
    assert {path.name for path in files.iterdir()} == FILES and tags == ["v1.2.3"]
    (files / "signers").write_text(f"keras_dist {(keys / 'key.pub').read_text()}")
    steps = (ROOT / "CONTRIBUTING.md").read_text().partition("ssh-keygen -Y verify")
    verify = steps[1] + steps[2].partition("```")[0]
    subprocess.run(["bash", "-ec", verify], cwd=files, check=True)
    (files / "keras_dist-1.2.3.tar.gz").write_text("another")
    assert subprocess.run(["bash", "-ec", verify], cwd=files).returncode == 1
