"""The files of sharded checkpoints: their layout, their generations and their damage."""

import errno
import hashlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from keras_dist import errors
from keras_dist.launch.cli import main
from keras_dist.resume import format, tensor_file
from keras_dist.resume.format import Writer
from keras_dist.resume.read import newest
from keras_dist.resume.tensor_file import Tensor


def tensor(name, values):
    array = np.asarray(values)
    return Tensor(name, array.dtype.name, array.view(np.uint8).reshape(-1).data)


def test_the_layout_is_that_of_safetensors(tmp_path):
    path = tmp_path / "part.safetensors"
    arrays = {"0:0": np.arange(5, dtype="float32"), "1:7": np.array([True, False, True])}
    found = tensor_file.write(path, [tensor(*each) for each in arrays.items()], {"rank": "0"})
    content = path.read_bytes()
    assert found == hashlib.sha256(content).hexdigest() == tensor_file.digest(path)
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"rank": "0"},
        "0:0": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
        "1:7": {"dtype": "BOOL", "shape": [3], "data_offsets": [20, 23]},
    }
    for name, entry in tensor_file.read_header(path).items():
        read = np.empty(entry.nbytes, np.uint8)
        tensor_file.read_into(path, entry.offset, read.data)
        np.testing.assert_array_equal(read.view(arrays[name].dtype), arrays[name])


def test_dtypes_have_the_sizes_that_the_format_expects(tmp_path):
    import ml_dtypes

    for number, (name, code) in enumerate(tensor_file.CODES.items()):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        path = tmp_path / f"{number}.safetensors"
        tensor_file.write(path, [tensor("a", np.zeros(6, dtype))], {})
        header = json.loads(path.read_bytes()[8:].partition(b"}}")[0] + b"}}")
        assert header["a"]["dtype"] == code and header["a"]["shape"] == [6]
    tensor_file.write(tmp_path / "other", [Tensor("a", "complex64", memoryview(bytes(16)))], {})
    assert tensor_file.read_header(tmp_path / "other")["a"].nbytes == 16


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "missing" / "part"
    with pytest.raises(FileNotFoundError) as caught:
        tensor_file.write(path, [], {})
    assert caught.value.filename == str(path)
    short = tmp_path / "short"
    short.write_bytes(b"\xff" * 9)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        tensor_file.read_header(short)
    with pytest.raises(OSError, match="ends 3 bytes too early"):
        tensor_file.read_into(short, 8, memoryview(bytearray(4)))


def write(directory, keep=2, parts=2):
    number = format.begin(directory)
    for rank in range(parts):
        format.write_part(directory, number, rank, 2, [tensor("0:0", np.full(9, number))])
    if parts == 2:
        found = format.parts_of(directory, number, 2)
        format.commit(directory, number, found, {"epoch": number}, keep)
    return number


def test_generations_are_kept_until_newer_ones_are_whole(tmp_path):
    directory = tmp_path / "made"
    assert [write(directory) for _ in range(3)] == [1, 2, 3]
    assert [format.read(p).about["epoch"] for p in format.newest_first(directory)] == [
        3,
        2,
    ]
    assert write(directory, parts=1) == 4  # of a job that was killed
    assert [format.read(p).about["epoch"] for p in format.newest_first(directory)] == [
        3,
        2,
    ]
    assert write(directory, keep=1) == 5
    assert sorted(path.name for path in directory.iterdir())[0] == "00000005"
    assert len([*directory.iterdir()]) == 2


def test_the_generation_that_was_read_is_kept_and_damaged_ones_go(tmp_path):
    assert [write(tmp_path, keep=3) for _ in range(3)] == [1, 2, 3]
    number = format.begin(tmp_path)  # training resumed from 1: the others are damaged
    format.commit(tmp_path, number, [], {}, keep=2, previous=1)
    kept = [int(path.name[:8]) for path in format.newest_first(tmp_path)]
    assert kept == [4, 1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "00000001",
        "00000004",
    ]


@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_left_to_resume_from_after_a_removal(tmp_path, monkeypatch, is_link):
    directory = tmp_path / "backup"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        directory.symlink_to(tmp_path / "elsewhere")
    assert [write(directory) for _ in range(2)] == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(format.shutil, "rmtree", lambda *given, **options: None)
        format.remove(directory)  # of a job that is killed meanwhile
    assert newest(directory) is None
    assert write(directory) == 3
    for _ in range(2):
        format.remove(directory)
        assert newest(directory) is None
        assert not is_link or [*directory.iterdir()] == []
        assert directory.exists() == is_link


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path, monkeypatch, capsys
):
    assert write(tmp_path) == 1

    def refuse(path="."):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, refuse)
        with pytest.raises(PermissionError):
            newest(tmp_path)
        assert main(["checkpoint", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert newest(tmp_path).about == {"epoch": 1}


def test_a_committed_generation_is_not_discarded(tmp_path, monkeypatch):
    write(tmp_path)
    format.discard(tmp_path, 1)
    [path] = format.newest_first(tmp_path)
    assert format.find_damage(format.read(path), range(2)) == []
    assert write(tmp_path, parts=1) == 2
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "iterdir", lambda path: os.listdir(path / "missing"))
        format.discard(tmp_path, 2)  # whether there is a manifest cannot be seen
    assert (tmp_path / "00000002").exists()
    format.discard(tmp_path, 2)
    assert not (tmp_path / "00000002").exists()


def test_a_writer_whose_fit_has_ended_gives_up_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(format, "VISIBLE_SECONDS", 0.1)
    arguments = tmp_path, format.begin(tmp_path), (0, 2), [tensor("0:0", np.zeros(9))], {}, 2
    fit = threading.Thread(target=Writer, args=arguments)  # not the main thread
    fit.start()
    fit.join()
    for thread in threading.enumerate():
        if thread.name == "keras_dist checkpoint":
            thread.join(60)
            assert not thread.is_alive()
    [text] = [text for text in caplog.messages if "the last checkpoint in" in text]
    assert str(tmp_path) in text and "the parts of 2 ranks" in text


def test_a_listing_that_has_changed_is_looked_at_again(tmp_path, monkeypatch):
    write(tmp_path, keep=1)
    find, written = format.find_damage, []

    def find_behind_training(found, ranks=None):
        if not written:
            written.append(write(tmp_path, keep=1))  # which removes the first one
        return find(found, ranks)

    monkeypatch.setattr(format, "find_damage", find_behind_training)
    assert newest(tmp_path).generation.about["epoch"] == 2 and written == [2]
    [path] = format.newest_first(tmp_path)
    format.read(path).parts[0].unlink()
    with pytest.raises(errors.CheckpointError, match="No such file"):
        newest(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    write(tmp_path)
    [path] = format.newest_first(tmp_path)
    text = path.read_text().replace(format.FORMAT, "another format")
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    other = tmp_path / f"00000002-{digest}.json"
    other.write_text(text)
    with pytest.raises(ValueError, match="another format"):
        format.read(other)


def test_what_is_damaged_is_found(tmp_path):
    write(tmp_path)
    [path] = format.newest_first(tmp_path)
    found = format.read(path)
    assert format.find_damage(found, range(2)) == []
    content = bytearray(found.parts[1].read_bytes())
    content[-1] ^= 1
    found.parts[1].write_bytes(content)
    found.parts[0].unlink()
    missing, other = format.find_damage(found, range(2))
    assert str(found.parts[0]) in missing and "No such file" in missing
    assert str(found.parts[1]) in other and found.digests[1] in other
    path.write_bytes(path.read_bytes() + b" ")
    assert format.read(path) is None


def test_the_command_lists_generations_and_names_damaged_parts(tmp_path, capsys):
    format.write(tmp_path, [tensor("0:0", np.zeros(3))], {"epoch": None})  # an elastic state
    about = {"epoch": 2, "step": 5, "ranks": 2}
    for _ in range(2):
        number = format.begin(tmp_path)
        parts = [
            format.write_part(tmp_path, number, rank, 2, [tensor("0:0", np.zeros(2**16))])
            for rank in range(2)
        ]
        format.commit(tmp_path, number, parts, about, keep=3)
    parts[1].unlink()
    assert main(["checkpoint", str(tmp_path)]) == 0
    head, third, second, first = capsys.readouterr().out.splitlines()
    assert head.split() == ["generation", "epoch", "step", "ranks", "parts", "MiB", "state"]
    assert third.split()[:6] == ["00000003", "2", "5", "2", "2", "0.50"]
    assert f"damaged: {parts[1]}: No such file" in third
    assert second.split() == ["00000002", "2", "5", "2", "2", "1.00", "whole"]
    assert first.split() == ["00000001", "None", "-", "-", "1", "0.00", "whole"]
    for path in tmp_path.glob("*.json"):
        path.write_bytes(b"{}")
    assert main(["checkpoint", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.count("damaged: ") == 3 and "has no undamaged generation" in told.err
    assert main(["checkpoint", str(tmp_path / "nothing")]) == 1
    assert "has no generation" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    assert write(tmp_path) == 1
    ours, theirs = os.pipe()
    os.close(ours)
    words = [sys.executable, "-m", "keras_dist.launch.cli", "checkpoint", str(tmp_path)]
    ended = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_copy_of_a_generation_has_the_same_names_and_bytes(tmp_path):
    for number in (3, 4):
        path = format.write(tmp_path / "a", [tensor("0:0", np.arange(9))], {}, number=number)
        blocks = [path.read_bytes(), *(part.read_bytes() for part in format.read(path).parts)]
        copy = format.write_copy(tmp_path / "b", path.name, blocks)
        assert copy.name == path.name and copy.read_bytes() == blocks[0]
        assert format.find_damage(format.read(copy)) == []
    for wrong in ([b"{}", blocks[1]], [blocks[0], blocks[1][:-1]], []):
        with pytest.raises(OSError, match="arrived damaged"):
            format.write_copy(tmp_path / "c", path.name, wrong)
    assert [*(tmp_path / "c").iterdir()] == []
