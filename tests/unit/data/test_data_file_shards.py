"""Sharded files: how many are open, damaged ones, and the values that each kind of file holds."""

import io
import tarfile

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_files import WRITERS, decode, split
from data_ranks import numbers_of, on_ranks, without_pipelines
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from keras_dist import data, errors
from keras_dist.data.partition import Plan
from keras_dist.data.shard_source import Decoder, ShardOrder
from keras_dist.data.tar_files import bytes_of, samples_of

# --- Index arithmetic


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_at_most_so_many_shards_are_shuffled_together(lengths, mixed):
    total = sum(lengths)
    rows = ShardOrder(np.array(lengths), 0, 1, mixed, [1]).of(Plan(0, 1, total, total, 1, total), 0)
    drawn = np.repeat(np.arange(len(lengths)), lengths)[rows]
    # The open shards bound the memory: a shard that has been left does not return.
    first = {n: int(np.argmax(drawn == n)) for n in range(len(lengths))}
    last = {p: len(drawn) - 1 - int(np.argmax(drawn[::-1] == p)) for p in range(len(lengths))}
    for place in range(len(drawn)):
        assert sum(first[p] <= place <= last[p] for p in first) <= mixed


# --- Kinds of files


def shard_of(kind, paths, **options):
    """Returns the shard of this rank, unshuffled."""
    options = {"batch_size": 4, "shuffle": False} | options
    if kind == "tar":
        return data.tar(paths, decode, **options)
    return {"npz": data.npz, "parquet": data.parquet}[kind](paths, "x", "y", **options)


def numbers(part):
    """Returns the numbers of an epoch, by batch."""
    return [numbers_of(batch) for batch in part]


@pytest.fixture(autouse=True)
def _no_pipelines():
    with without_pipelines():
        yield


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes files with the given numbers of samples."""

    def write_files(kind, *lengths):
        paths = [tmp_path / f"{index}.{kind}" for index in range(len(lengths))]
        for path, these in zip(paths, split(lengths), strict=True):
            WRITERS[kind](str(path), these)
        return paths

    return write_files


@pytest.mark.parametrize("kind", ["npz", "parquet", "tar"])
def test_a_missing_file_is_named_or_skipped(kind, write, caplog):
    paths = write(kind, 11, 7, 13, 10)
    paths[1].unlink()
    with pytest.raises(
        errors.DataError, match=rf"^\[rank .*\] Expected .*{paths[1].name}"
    ) as caught:
        on_ranks(2, lambda: shard_of(kind, paths))
    assert "unreadable='skip'" in str(caught.value)
    parts = on_ranks(2, lambda: shard_of(kind, paths, unreadable="skip"))
    found = [number for part in parts for batch in numbers(part) for number in batch]
    assert sorted(found) == [number for number in range(41) if not 11 <= number < 18]
    assert "skips 1 files" in caplog.text and paths[1].name in caplog.text


def test_a_sample_that_cannot_be_decoded_is_replaced_within_its_batch(write, capsys):
    paths = write("tar", 8)
    paths[0].write_bytes(paths[0].read_bytes().replace(b"5" + bytes(511), b"!" + bytes(511)))
    part = shard_of("tar", paths, unreadable="skip")
    assert numbers(part) == [[0, 1, 2, 3], [4, 6, 6, 7]]
    assert "005 in" in capsys.readouterr().out
    part = shard_of("tar", paths, unreadable="skip", batch_size=1)
    assert numbers(part) == [[0], [1], [2], [3], [4], [4], [6], [7]]
    part = shard_of("tar", paths, unreadable="skip", batch_size=1)
    with pytest.raises(errors.DataError, match=r"005 in .* Check the files"):
        part[5]


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("npz", "z", "an array 'z' in"),
        ("parquet", "z", "a column 'z' in"),
        ("parquet", "text", "text string"),
        ("parquet", ["a", "x"], "a int64, x fixed_size_list"),
    ],
)
def test_missing_or_unsuitable_data_is_named(kind, names, message, write):
    read = getattr(data, kind)
    with pytest.raises(
        errors.DataError, match=r"^\[rank 0 of 1\] Expected .* Received: "
    ) as caught:
        read(write(kind, 9, 4), names, unreadable="skip")
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", ["V2", [("a", "f4")]])
def test_an_array_of_neither_numbers_nor_strings_is_refused(dtype, tmp_path):
    np.savez(tmp_path / "0.npz", x=np.zeros(4, dtype))
    with pytest.raises(errors.DataError, match="holds neither numbers nor strings"):
        data.npz(tmp_path / "0.npz", "x")


@pytest.mark.parametrize("missing", [lambda n: [n, None], lambda n: None if n == 3 else [n, n]])
def test_null_integers_are_an_error(missing, tmp_path):
    lists = pa.array([missing(n) for n in range(8)], pa.list_(pa.int64(), 2))
    pa.parquet.write_table(pa.table({"x": lists}), tmp_path / "0.parquet")
    with pytest.raises(errors.DataError, match=r"'x' of .* in row group 0\.") as caught:
        data.parquet(tmp_path / "0.parquet", "x")[0]
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint8(), pa.bool_()])
def test_a_null_is_named_with_its_column_and_row_group(kind, tmp_path):
    columns = {
        "x": pa.array([True, False, True, None]).cast(kind),
        "f": pa.array([1.0, None, 3.0, 4.0]),
    }
    path = tmp_path / "0.parquet"
    pa.parquet.write_table(pa.table(columns), path, row_group_size=2)
    part = data.parquet(path, "x", "f", batch_size=2, shuffle=False)
    np.testing.assert_array_equal(part[0][1], [1, np.nan])
    with pytest.raises(
        errors.DataError, match=r"'x' of .*0\.parquet .* 1 in row group 1\."
    ) as caught:
        part[1]
    assert "damaged" not in str(caught.value) and str(kind) in str(caught.value)


def members_of(path, *names):
    """Writes a tar file of members whose contents are their names; `/` ends a directory."""
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name.removesuffix("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            content = b"" if info.isdir() else name.encode()
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


# Keys and fields are those that webdataset 1.0.2 finds.
MEMBERS = {
    "case": (["7.JPG", "7.Seg.PNG"], [("7", ["jpg", "seg.png"])]),
    "directories": (["a/", "./a/7.jpg", "b.v1/7.jpg"], [("./a/7", ["jpg"]), ("b.v1/7", ["jpg"])]),
    "absolute": (["/a/7.jpg"], [("/a/7", ["jpg"])]),
    "without extension": (["README", "a/7", "7.jpg", "7"], [("7", ["jpg"])]),
    "hidden": ([".7.jpg", "7.jpg"], [("7", ["jpg"])]),
    "hidden in a directory": (["a/.7.jpg"], [("a/", ["7.jpg"])]),
    "meta": (["__a__", "__a__/7.jpg", "a/__b__.jpg"], [("a/__b__", ["jpg"])]),
    "trailing dot": (["7."], [("7", [""])]),
    "apart": (["7.a", "8.a", "7.b"], [("7", ["a"]), ("8", ["a"]), ("7", ["b"])]),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_members_form_samples_as_in_webdataset(case, tmp_path):
    names, expected = MEMBERS[case]
    path = members_of(tmp_path / "0.tar", *names)
    found = [bytes_of(path, sample) for sample in samples_of(path)]
    assert [(each.pop("__key__").decode(), list(each)) for each in found] == expected
    for each in found:
        assert all(value.decode().lower().endswith(field) for field, value in each.items())


@pytest.mark.parametrize("names", [("7.jpg", "7.JPG"), ("7.jpg", "7.jpg"), ("7.__key__",)])
def test_a_second_member_of_a_field_is_an_error(names, tmp_path):
    path = members_of(tmp_path / "0.tar", *names)
    with pytest.raises(ValueError, match="is a second field"):
        samples_of(path)


def test_a_list_of_names_is_a_matrix(write):
    paths = write("parquet", 5)
    for names, shape in (("a", ()), (["a"], (1,)), (["a", "y"], (2,))):
        part = data.parquet(paths, names, batch_size=5, shuffle=False)
        assert [np.shape(batch)[1:] for batch in part] == [shape]


# --- Images


@pytest.fixture
def tree(tmp_path):
    """Makes a directory of 3 classes with 9, 2 and 5 images of uniform grey 1, 2, ..."""
    greys = iter(range(1, 17))
    for name, count in (("b", 9), ("a", 2), ("c", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("L", (9, 7), next(greys)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def image_part(*arguments, **options):
    options = {"batch_size": 4, "color_mode": "grayscale"} | options
    return data.image_dataset(*arguments, image_size=(4, 6), **options)


def pairs_of(part):
    """Returns grey and label of each image of an epoch."""
    batches = list(part)
    assert all(x.shape[1:] == (4, 6, 1) and x.dtype == np.float32 for x, _ in batches)
    return [
        (int(x[0, 0, 0]), y.tolist()) for xs, ys in batches for x, y in zip(xs, ys, strict=True)
    ]


LABELS = {**dict.fromkeys(range(1, 10), 1), 10: 0, 11: 0, **dict.fromkeys(range(12, 17), 2)}


def test_images_of_a_directory_come_once_with_sorted_classes(tree):
    parts = on_ranks(3, lambda: image_part(tree))
    assert [part.class_names for part in parts] == [["a", "b", "c"]] * 3
    assert sorted(pair for part in parts for pair in pairs_of(part)) == sorted(LABELS.items())


def grey_of_16_bits(path):
    values = np.array([[0, 1000], [40000, 65535]], np.uint16)
    Image.frombytes("I;16", (2, 2), values.tobytes()).save(path)


IMAGES = {
    "grey of 16 bits": grey_of_16_bits,
    "grey and alpha": lambda path: Image.new("LA", (2, 2), (100, 7)).save(path),
    "palette": lambda path: Image.new("RGB", (2, 2), (250, 10, 90)).quantize(2).save(path),
    "1 bit": lambda path: Image.new("1", (2, 2), 1).save(path),
}


@pytest.mark.parametrize("mode", ["rgb", "grayscale"])
@pytest.mark.parametrize("kind", IMAGES)
def test_values_of_images_are_those_of_keras(kind, mode, tmp_path):
    import keras

    IMAGES[kind](tmp_path / "0.png")
    [found] = data.image_dataset(tmp_path, (2, 2), label_mode=None, color_mode=mode)
    [batch] = keras.utils.image_dataset_from_directory(
        tmp_path, labels=None, color_mode=mode, image_size=(2, 2), verbose=False
    )
    # Pillow and TensorFlow round the grey of a colour differently.
    np.testing.assert_allclose(found, np.array(batch), atol=1 if kind == "palette" else 0)
    if kind == "grey of 16 bits":
        assert found[0, ..., 0].tolist() == [[0, 3], [156, 255]]


def test_a_bitmap_with_a_palette_has_its_colours(tmp_path):
    # TensorFlow reads the numbers of the colours: findings/tensorflow_bmp_palette.sh.
    Image.new("RGB", (2, 2), (250, 10, 90)).quantize(2).save(tmp_path / "0.bmp")
    [found] = data.image_dataset(tmp_path, (2, 2), label_mode=None)
    assert np.abs(found[0, 0, 0] - [250, 10, 90]).max() <= 1


def test_labels_have_the_form_of_keras(tree):
    part = image_part(tree, label_mode="categorical", shuffle=False)
    assert pairs_of(part)[0] == (10, [1.0, 0.0, 0.0])
    assert image_part(tree, label_mode=None, shuffle=False)[0].shape == (4, 4, 6, 1)
    with pytest.raises(errors.DataError, match="two classes"):
        image_part(tree, label_mode="binary")
    with pytest.raises(errors.ArgumentError, match=r"shuffle='global'.*Pass samples to shard\(\)"):
        image_part(tree, own=True, shuffle="global")


def test_a_dataframe_lists_images_with_classes_or_values(tree):
    frame = pandas.DataFrame({"file": ["b/0.png", "a/0.png", "b/0.png"], "kind": [7, 5, 7]})
    frame["value"] = [0.5, 1.5, 2.5]
    options = {"directory": tree, "x_col": "file", "y_col": "kind", "shuffle": False}
    part = image_part(frame, **options)
    assert part.class_names == ["5", "7"] and pairs_of(part) == [(1, 1), (10, 0), (1, 1)]
    part = image_part(frame, label_mode="raw", **options | {"y_col": ["value", "kind"]})
    assert pairs_of(part) == [(1, [0.5, 7.0]), (10, [1.5, 5.0]), (1, [2.5, 7.0])]
    with pytest.raises(errors.DataError, match="a column 'grade'"):
        image_part(frame, **options | {"y_col": "grade"})


def test_damaged_images_are_named_or_skipped(tree, caplog, capsys):
    (tree / "a" / "0.png").write_text("no image")
    whole = (tree / "b" / "0.png").read_bytes()
    (tree / "b" / "0.png").write_bytes(whole[:-30])  # its header can be read
    with pytest.raises(errors.DataError, match=r"^\[rank 0.*\] Expected .*a/0\.png to be readable"):
        on_ranks(2, lambda: image_part(tree))
    parts = on_ranks(2, lambda: image_part(tree, unreadable="skip"))
    assert "skips 1 files" in caplog.text
    pairs = [pair for part in parts for pair in pairs_of(part)]
    assert len(pairs) == 15 and set(pairs) == set(LABELS.items()) - {(10, 0), (1, 1)}
    assert "b/0.png is skipped" in capsys.readouterr().out
    (tree / "a" / "0.png").unlink()
    with pytest.raises(errors.DataError, match=r"b/0\.png to be readable"):
        [pairs_of(part) for part in on_ranks(2, lambda: image_part(tree))]


def test_a_sample_whose_name_is_not_valid_text_is_skipped(capsys):
    def decode(place):
        if place == 1:
            raise OSError("cut off")
        return np.array(place)

    decoder = Decoder(decode, lambda place: f"image-\udcff-{place}", "skip")
    assert decoder.batch([0, 1, 2]).tolist() == [0, 2, 2]
    assert "image-\\udcff-1 is skipped, 1 so far" in capsys.readouterr().out
