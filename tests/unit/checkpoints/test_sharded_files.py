"""The files of sharded checkpoints: their layout, their generations and their damage."""

import errno
import hashlib
import json
import os
import pathlib
import struct
import threading

import numpy as np
import pytest

from keras_dist import errors
from keras_dist.checkpoints import writer as writer_module
from keras_dist.checkpoints.choosing import newest
from keras_dist.checkpoints.reading import Arrays, Contents
from keras_dist.checkpoints.writer import Writer
from keras_dist.storage import generations, tensor_file
from keras_dist.storage.tensor_file import Tensor


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
    number = generations.begin(directory)
    for rank in range(parts):
        generations.write_part(directory, number, rank, 2, [tensor("0:0", np.full(9, number))])
    if parts == 2:
        found = generations.parts_of(directory, number, 2)
        generations.commit(directory, number, found, {"epoch": number}, keep)
    return number


def test_generations_are_kept_until_newer_ones_are_whole(tmp_path):
    directory = tmp_path / "made"
    assert [write(directory) for _ in range(3)] == [1, 2, 3]
    assert [generations.read(p).about["epoch"] for p in generations.newest_first(directory)] == [
        3,
        2,
    ]
    assert write(directory, parts=1) == 4  # of a job that was killed
    assert [generations.read(p).about["epoch"] for p in generations.newest_first(directory)] == [
        3,
        2,
    ]
    assert write(directory, keep=1) == 5
    assert sorted(path.name for path in directory.iterdir())[0] == "00000005"
    assert len([*directory.iterdir()]) == 2


def test_the_generation_that_was_read_is_kept_and_damaged_ones_go(tmp_path):
    assert [write(tmp_path, keep=3) for _ in range(3)] == [1, 2, 3]
    number = generations.begin(tmp_path)  # training resumed from 1: the others are damaged
    generations.commit(tmp_path, number, [], {}, keep=2, previous=1)
    kept = [int(path.name[:8]) for path in generations.newest_first(tmp_path)]
    assert kept == [4, 1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "00000001",
        "00000004",
    ]


def test_a_committed_generation_is_not_discarded(tmp_path, monkeypatch):
    write(tmp_path)
    generations.discard(tmp_path, 1)
    [path] = generations.newest_first(tmp_path)
    assert generations.find_damage(generations.read(path), range(2)) == []
    assert write(tmp_path, parts=1) == 2
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "iterdir", lambda path: os.listdir(path / "missing"))
        generations.discard(tmp_path, 2)  # whether there is a manifest cannot be seen
    assert (tmp_path / "00000002").exists()
    generations.discard(tmp_path, 2)
    assert not (tmp_path / "00000002").exists()


def test_a_failure_after_the_manifest_leaves_a_whole_generation(tmp_path, monkeypatch):
    writer, flush, flushed = Writer(tmp_path, keep=2), os.fsync, []

    def flush_or_fail(handle):
        flushed.append(handle)
        if len(flushed) == 4:  # part, its directory, manifest, its directory
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(handle)

    monkeypatch.setattr(os, "fsync", flush_or_fail)
    writer.start(generations.begin(tmp_path), (0, 1), [tensor("0:0", np.zeros(9))], {"epoch": 1})
    assert writer.wait_for_part() is None
    assert writer.finish(are_whole=True).errno == errno.EIO
    assert writer.is_whole()
    writer.discard()
    [path] = generations.newest_first(tmp_path)
    assert generations.find_damage(generations.read(path), range(1)) == []


def test_a_writer_whose_fit_has_ended_gives_up_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "VISIBLE_SECONDS", 0.1)
    writer = Writer(tmp_path, keep=2)
    arguments = generations.begin(tmp_path), (0, 2), [tensor("0:0", np.zeros(9))], {}
    fit = threading.Thread(target=writer.start, args=arguments)  # not the main thread
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
    find = generations.find_damage

    def find_behind_training(found, ranks):
        monkeypatch.setattr(generations, "find_damage", find)
        assert write(tmp_path, keep=1) == 2  # which removes the first one
        return find(found, ranks)

    monkeypatch.setattr(generations, "find_damage", find_behind_training)
    assert newest(tmp_path).generation.about["epoch"] == 2
    [path] = generations.newest_first(tmp_path)
    generations.read(path).parts[0].unlink()
    with pytest.raises(errors.CheckpointError, match="No such file"):
        newest(tmp_path)


def test_names_of_arrays_are_found_without_reading(tmp_path):
    arrays = Arrays(Contents(None, {}, {"seed": None}))
    assert "seed" in arrays and "other" not in arrays


def test_a_manifest_of_another_version_is_refused(tmp_path):
    write(tmp_path)
    [path] = generations.newest_first(tmp_path)
    text = path.read_text().replace(generations.FORMAT, "another format")
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    other = tmp_path / f"00000002-{digest}.json"
    other.write_text(text)
    with pytest.raises(ValueError, match="another format"):
        generations.read(other)


def test_what_is_damaged_is_found(tmp_path):
    write(tmp_path)
    [path] = generations.newest_first(tmp_path)
    found = generations.read(path)
    assert generations.find_damage(found, range(2)) == []
    content = bytearray(found.parts[1].read_bytes())
    content[-1] ^= 1
    found.parts[1].write_bytes(content)
    found.parts[0].unlink()
    missing, other = generations.find_damage(found, range(2))
    assert str(found.parts[0]) in missing and "No such file" in missing
    assert str(found.parts[1]) in other and found.digests[1] in other
    path.write_bytes(path.read_bytes() + b" ")
    assert generations.read(path) is None
