"""Copies in a cache: complete or absent, and made once per node."""

import functools
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
from start_jobs import launcher, script

from keras_dist.data import fetching
from keras_dist.data.fetching import Fetch

CONTENT = os.urandom(3 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def fetch(source, cache, sha256=None, unpack=False):
    made = Fetch(str(source), cache, sha256, unpack)
    made.run()
    return made


def nothing_is_left(cache):
    return all(path.suffix == ".lock" for own in cache.iterdir() for path in own.iterdir())


def test_a_file_is_copied_once_and_again_when_it_has_changed(source, cache):
    first = fetch(source, cache, SHA256)
    assert first.fetched and first.path.read_bytes() == CONTENT
    assert first.done_nbytes == first.total_nbytes == len(CONTENT)
    own = first.path.parents[1]
    assert own == cache / fetching.private_name() and own.stat().st_mode & 0o077 == 0
    assert not fetch(source, cache, SHA256).fetched
    source.write_bytes(b"other")
    with pytest.raises(OSError, match="SHA-256"):
        fetch(source, cache, SHA256)
    assert first.path.read_bytes() == CONTENT
    assert fetch(source, cache).path.read_bytes() == b"other"


HOLDER = """
import sys
from pathlib import Path
from keras_dist.data.fetching import Fetch
source, cache = sys.argv[1:]
made = Fetch(source, Path(cache), None, False)
made.run()
print(made.path, flush=True)
sys.stdin.readline()
print(len(open(made.path, "rb").read()), flush=True)
"""


def test_an_old_copy_stays_while_a_process_uses_it(source, cache):
    def job(content):
        source.write_bytes(content)
        command = [sys.executable, "-c", HOLDER, str(source), str(cache)]
        made = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return made, Path(made.stdout.readline().strip())

    jobs = [job(b"1"), job(b"22"), job(b"333")]
    assert len({path for _, path in jobs}) == 3
    for count, (running, path) in enumerate(jobs, start=1):
        assert running.communicate("\n")[0] == f"{count}\n" and path.exists()
    kept = fetch(source, cache)
    assert not kept.fetched and kept.path == jobs[2][1]
    assert [path.exists() for _, path in jobs] == [False, False, True]


@pytest.mark.parametrize("sha256", [None, SHA256], ids=["no checksum", "checksum"])
@pytest.mark.parametrize("damaged", [CONTENT[:-1], bytes(len(CONTENT))], ids=["short", "other"])
def test_a_damaged_copy_is_made_again(damaged, sha256, source, cache, caplog):
    path = fetch(source, cache, sha256).path
    path.write_bytes(damaged)
    assert fetch(source, cache, sha256).fetched
    assert path.read_bytes() == CONTENT
    assert f"{path} has changed since it was copied" in caplog.text


def change(tree):
    (tree / "a" / "1").write_text("two")


def remove(tree):
    (tree / "a" / "1").unlink()


def add(tree):
    (tree / "a" / "2").write_text("two")


def link(tree):
    (tree / "a" / "1").rename(tree.parent / "1")
    (tree / "a" / "1").symlink_to(tree.parent / "1")


@pytest.mark.parametrize("damage", [change, remove, add, link])
@pytest.mark.parametrize("unpack", [False, True])
def test_a_damaged_directory_is_copied_again(damage, unpack, tmp_path, cache):
    if unpack:
        given = tmp_path / "data.tar"
        given.write_bytes(tar_with("a/1"))
    else:
        given = tmp_path / "tree"
        (given / "a").mkdir(parents=True)
        (given / "a" / "1").write_text("one")
    path = fetch(given, cache, unpack=unpack).path
    assert not fetch(given, cache, unpack=unpack).fetched
    damage(path)
    assert fetch(given, cache, unpack=unpack).fetched
    assert {one.name for one in path.rglob("*")} == {"a", "1"}
    assert (path / "a" / "1").read_text() == "one" and not (path / "a" / "1").is_symlink()


# --- Files of other users


STRANGER = 54321


@pytest.fixture
def give_away():
    """Returns a function that gives a file to another user; only root can."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: files of another user; only root can make them")
    return lambda path: os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("what", ["data.bin", "note.json", "", "..", "../.."])
def test_what_belongs_to_another_user_is_refused(what, source, cache, give_away):
    entry = fetch(source, cache).path.parent
    place = (entry / what).resolve()  # in the copy, or a directory above it
    give_away(place)
    with pytest.raises(fetching.NotOwnError) as refused:
        fetch(source, cache)
    assert refused.value.received.startswith(f"one of user uid {STRANGER}, mode ")
    assert str(place) in refused.value.expected
    assert ".." in what or str(entry) in refused.value.remedy


def test_a_file_of_another_user_in_a_tree_is_refused(tmp_path, cache, give_away):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "1").write_text("one")
    path = fetch(tmp_path / "tree", cache).path
    give_away(path / "1")
    with pytest.raises(fetching.NotOwnError, match=f"user uid {STRANGER}"):
        fetch(tmp_path / "tree", cache)


def test_links_and_directories_writable_by_others_are_refused(source, cache, tmp_path):
    path = fetch(source, cache).path
    own = path.parents[1]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fetching.NotOwnError, match="and not to be a link"):
        fetch(source, cache)
    path.unlink()
    own.chmod(0o750)
    with pytest.raises(fetching.NotOwnError, match=r"directory of this user alone.*drwxr-x---"):
        fetch(source, cache)
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    with pytest.raises(fetching.NotOwnError, match=r"directory of this user alone.*lrwx"):
        fetch(source, cache)
    own.unlink()
    cache.chmod(0o777)
    with pytest.raises(fetching.NotOwnError, match=r"others not to write to it.*drwxrwxrwx"):
        fetch(source, cache)
    cache.chmod(0o1777)
    assert fetch(source, cache).fetched


def test_a_link_to_the_cache_is_followed_once(source, cache, tmp_path):
    (tmp_path / "real").mkdir()
    cache.symlink_to(tmp_path / "real")
    assert fetch(source, cache).path.is_relative_to(tmp_path / "real")


def test_files_of_a_killed_process_are_removed(source, cache):
    entry = fetch(source, cache).path.parent
    left = entry.parent / f".{entry.name}.left"
    left.mkdir()
    entry.rename(left / "half")
    assert fetch(source, cache).fetched and not left.exists()


def test_a_directory_that_shrinks_while_it_is_copied_is_refused(tmp_path, cache, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "1").write_text("one")
    copytree = fetching.shutil.copytree

    def late(source, *arguments, **options):
        (tmp_path / "tree" / "1").write_text("o")
        return copytree(source, *arguments, **options)

    monkeypatch.setattr(fetching.shutil, "copytree", late)
    with pytest.raises(OSError, match="ended after 1 of 3 bytes"):
        fetch(tmp_path / "tree", cache)
    assert nothing_is_left(cache)


class Server(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar = []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"too little")
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def url(tmp_path):
    handler = functools.partial(Server, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        Server.asked.clear()


def test_a_download_is_checked(source, cache, url):
    assert fetch(f"{url}/data.bin", cache, SHA256).path.read_bytes() == CONTENT
    assert not fetch(f"{url}/data.bin", cache, SHA256).fetched
    assert Server.asked == ["/data.bin"]
    for bad, failure in (("short", "after 10 of 100 bytes"), ("missing", "404")):
        with pytest.raises(Exception, match=failure):
            fetch(f"{url}/{bad}", cache / bad)
        assert nothing_is_left(cache / bad)


def tar_with(name, link=None, owner=""):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size, info.mode = 3, 0o4777
        info.uname = info.gname = owner
        if link is not None:
            info.type, info.linkname, info.size = tarfile.SYMTYPE, link, 0
        archive.addfile(info, io.BytesIO(b"one"))
    return file.getvalue()


def zip_with(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "one")
    return file.getvalue()


@pytest.mark.parametrize("archive_with", [tar_with, zip_with])
def test_an_archive_is_unpacked_within_its_directory(archive_with, tmp_path, cache):
    archive = tmp_path / "data.archive"
    archive.write_bytes(archive_with("a/1"))
    made = fetch(archive, cache, unpack=True)
    assert (made.path / "a" / "1").read_text() == "one"
    assert [path.name for path in made.path.parent.iterdir()] != []
    archive.write_bytes(archive_with("../../../slipped"))
    with pytest.raises((OSError, tarfile.TarError), match="outside"):
        fetch(archive, cache / "other", unpack=True)
    assert nothing_is_left(cache / "other")
    assert not list(tmp_path.rglob("slipped"))


@pytest.mark.parametrize(
    "content",
    [tar_with("../../slipped"), tar_with("/slipped"), tar_with("a", link="/tmp")],
    ids=["above", "absolute", "link"],
)
def test_tar_files_are_unpacked_without_extraction_filters(content, tmp_path, cache, monkeypatch):
    extractall = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "data_filter")  # as in Python 3.11.0 to 3.11.3
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda self, path, members: extractall(self, path, members)
    )
    archive = tmp_path / "data.tar"
    archive.write_bytes(tar_with("a/1", owner="daemon"))  # root would give the file to this user
    made = fetch(archive, cache, unpack=True).path / "a" / "1"
    assert made.read_text() == "one" and made.stat().st_mode & 0o7777 == 0o755
    assert (made.stat().st_uid, made.stat().st_gid) == (os.getuid(), os.getgid())
    archive.write_bytes(content)
    with pytest.raises(OSError, match="a link or a path outside of it"):
        fetch(archive, cache / "other", unpack=True)
    assert nothing_is_left(cache / "other")


JOB = """
import sys
from keras_dist import data, errors
runtime.init()
url, cache = sys.argv[1:]
path = data.cached(f"{url}/data.bin", cache)
said = [f"{runtime.where()} {path} {len(open(path, 'rb').read())}"]
try:
    data.cached("/nowhere/data.bin", cache)
except errors.DataError as failure:
    said.append(f"raised {failure}")
try:
    data.cached(f"{url}/{runtime.rank() // 2}", cache)
except errors.MismatchError as failure:
    said.append(f"refused {failure}")
sys.stdout.write("".join(f"{line}\\n" for line in said))
"""


def test_a_node_copies_once_and_all_ranks_raise_failures(source, cache, url):
    # MPI sees two nodes with one disk: the second node finds the copy of the first.
    job = subprocess.run(
        [*launcher(), "-n", "3", *script(JOB), url, str(cache)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MPIR_CVAR_NUM_CLIQUES": "2"},
    )
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert Server.asked == ["/data.bin"]
    assert sum(f"data.bin {len(CONTENT)}" in line for line in lines) == 3
    assert sum("data.bin is cached now on 1 node, 3.1 MB in" in line for line in lines) == 1
    raised = [line for line in lines if line.startswith("raised [rank")]
    assert len(raised) == 3 and len(set(raised)) == 1
    assert "No such file" in raised[0] and f"on {os.uname().nodename}" in raised[0]
    assert sum(line.startswith("refused [rank 2 of 3]") for line in lines) == 3
