"""Sharded files: the rows of each rank, and each kind of file with several ranks in one process."""

import io
import tarfile

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from keras_dist import errors
from keras_dist.data import file_shards
from keras_dist.data.array_dataset import ArrayDataset
from keras_dist.data.decoding import Decoder
from keras_dist.data.epochs import numbers, restore
from keras_dist.data.image_files import ImageFiles
from keras_dist.data.image_labels import Classes, labels_of, listed
from keras_dist.data.npz_files import NpzFiles
from keras_dist.data.parquet_files import ParquetFiles, parquet
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.shard_source import Location, ShardSource
from keras_dist.data.tar_files import TarFiles, bytes_of, samples_of

# --- Index arithmetic

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(0, 99))
@settings(max_examples=100)
def test_shards_of_ranks_cover_each_row_once(lengths, size, mixed, seed):
    shards = [file_shards.rank_shard(lengths, rank, size) for rank in range(size)]
    keys = [None if seed is None else [seed, rank] for rank in range(size)]
    orders = [shard.order(key, mixed) for shard, key in zip(shards, keys, strict=True)]
    rows = [row for order in orders for row in zip(*(a.tolist() for a in order), strict=True)]
    assert sorted(rows) == [(p, row) for p, length in enumerate(lengths) for row in range(length)]
    assert file_shards.row_counts(lengths, size) == [len(order[0]) for order in orders]
    if len(lengths) < size:
        assert len({len(order[0]) for order in orders}) <= 2
    assert all(
        a.tolist() == b.tolist()
        for shard, key, order in zip(shards, keys, orders, strict=True)
        for a, b in zip(order, shard.order(key, mixed), strict=True)
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_at_most_so_many_shards_are_shuffled_together(lengths, mixed):
    shard = file_shards.full_shard(lengths)
    drawn, _ = shard.order([1], mixed)
    # The open shards bound the memory: a shard that has been left does not return.
    first = {n: int(np.argmax(drawn == n)) for n in range(len(lengths))}
    last = {p: len(drawn) - 1 - int(np.argmax(drawn[::-1] == p)) for p in range(len(lengths))}
    for place in range(len(drawn)):
        assert sum(first[p] <= place <= last[p] for p in first) <= mixed


def test_epochs_differ_and_runs_are_repeatable():
    shard = file_shards.full_shard([50, 50])
    one, again, two = (shard.order([3, 0, epoch], 1)[1].tolist() for epoch in (0, 0, 1))
    assert one == again != two


# --- Kinds of files


def options_of(rank, size, **arguments):
    return ShardOptions(
        **{"batch_size": 4} | arguments, rank=rank, size=size, where=f"[rank {rank}]"
    )


def write_npz(folder, name, numbers):
    path = folder / f"{name}.npz"
    np.savez(path, x=np.stack([numbers, numbers], 1).astype("float32"), y=numbers)
    return path


def write_parquet(folder, name, numbers):
    path = folder / f"{name}.parquet"
    lists = pa.FixedSizeListArray.from_arrays(np.repeat(numbers, 2).astype("float32"), 2)
    table = pa.table({"x": lists, "a": numbers, "y": numbers, "text": [str(n) for n in numbers]})
    pa.parquet.write_table(table, path, row_group_size=5)
    return path


def write_tar(folder, name, numbers):
    path = folder / f"{name}.tar"
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            for extension in ("x.bin", "cls"):
                # A path outside of the directory is only a name.
                info = tarfile.TarInfo(f"../../{number:03}.{extension}")
                text = str(number).encode()
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    return path


def decode(sample):
    number = int(sample["x.bin"])
    assert sample["__key__"].decode() == f"../../{number:03}" and int(sample["cls"]) == number
    return np.array([number, number], "float32"), np.int64(number)


KINDS = {
    "npz": (write_npz, lambda options, policy="raise": NpzFiles(("x", "y"), options)),
    "parquet": (write_parquet, lambda options, policy="raise": ParquetFiles(("x", "y"), options)),
    "tar": (write_tar, lambda options, policy="raise": TarFiles(decode, policy)),
}
LENGTHS_OF_FILES = (11, 7, 0, 13, 10)


def sources_of(kind, paths, size, policy="raise", **arguments):
    made = []
    for rank in range(size):
        options = options_of(rank, size, **arguments)
        files = KINDS[kind][1](options, policy)
        made.append(ShardSource(files, list(map(str, paths)), options, policy, []))
    return made


def batches_of(kind, paths, size, policy="raise", **arguments):
    made = sources_of(kind, paths, size, policy, **arguments)
    return [source.batches([other.held for other in made]) for source in made]


def epoch_of(batches, number=0):
    """Returns the sample numbers of an epoch, by batch."""
    epoch = []
    for step in range(batches.plan.steps):
        x, y = batches.batch(number, step)
        assert x.shape == (len(y), 2)
        assert x[:, 0].tolist() == y.tolist()
        epoch.append(y.tolist())
    return epoch


def flat(epochs):
    return sorted(number for epoch in epochs for batch in epoch for number in batch)


@pytest.fixture
def write(tmp_path):
    def write_files(kind, lengths=LENGTHS_OF_FILES):
        numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        lengths = enumerate(numbers)
        return [KINDS[kind][0](tmp_path, str(n), these) for n, these in lengths if len(these)]

    return write_files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_sample_comes_once_an_epoch(kind, size, write):
    paths = write(kind)
    parts = batches_of(kind, paths, size, shuffle=True)
    first, second = ([epoch_of(part, number) for part in parts] for number in range(2))
    for each in (first, second):
        assert flat(each) == list(range(41))
        assert len({len(epoch) for epoch in each}) == 1
        assert all(1 <= len(batch) <= 4 for epoch in each for batch in epoch)
    assert first != second
    assert first == [epoch_of(part) for part in batches_of(kind, paths, size, shuffle=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_global_order_is_independent_of_the_number_of_ranks(kind, write):
    paths = write(kind)

    def steps(size, epoch):
        parts = batches_of(kind, paths, size, shuffle="global", batch_size=12 // size)
        assert {part.epochs.global_batch for part in parts} == {12}
        epochs = [epoch_of(part, epoch) for part in parts]
        return [sorted(flat([step])) for step in zip(*epochs, strict=True)]

    alone = [steps(1, epoch) for epoch in range(2)]
    assert flat([alone[0]]) == list(range(41)) and alone[0] != alone[1]
    assert all(steps(size, epoch) == alone[epoch] for size in (2, 3, 4) for epoch in range(2))
    some, other = (batches_of(kind, paths, 1, shuffle="global", batch_size=n)[0] for n in (3, 4))
    assert some.epochs.kind == other.epochs.kind  # a later run with other ranks recognizes the data


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_files_than_ranks_are_sharded_by_row(kind, write):
    paths = write(kind, (4, 3))
    epochs = [epoch_of(part) for part in batches_of(kind, paths, 4, shuffle=False)]
    assert epochs == [[[0, 4]], [[1, 5]], [[2, 6]], [[3]]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, "global"])
def test_pad_and_drop_and_steps(kind, shuffle, write):
    paths = write(kind)
    for size in range(1, 5):
        for remainder in ("pad", "drop"):
            parts = batches_of(kind, paths, size, remainder=remainder, shuffle=shuffle)
            epochs = [epoch_of(part) for part in parts]
            sizes = [[len(batch) for batch in epoch] for epoch in epochs]
            assert all(each == sizes[0] for each in sizes) and set(sizes[0][:-1]) <= {4}
            seen = flat(epochs)
            if remainder == "pad":
                assert set(seen) == set(range(41))
                assert shuffle is True or len(seen) == -(-41 // size) * size
            else:
                assert sizes[0][-1] == 4 and len(seen) == len(set(seen))
        epochs = [
            epoch_of(part) for part in batches_of(kind, paths, size, steps=2, shuffle=shuffle)
        ]
        assert [len(epoch) for epoch in epochs] == [2] * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shuffle", [True, "global"])
def test_a_resumed_run_continues_within_an_epoch(kind, size, shuffle, write):
    paths = write(kind)

    def started():
        return [ArrayDataset(each) for each in batches_of(kind, paths, size, shuffle=shuffle)]

    def from_batch(step, parts):
        return [part[k][1].tolist() for part in parts for k in range(step, len(part))]

    parts = started()
    for part in parts:
        part.on_epoch_end()
    position, rest = numbers(), from_batch(2, parts)
    later = started()
    assert from_batch(2, later) != rest
    restore({name: position[name] for name in list(position)[:size]})
    assert from_batch(2, later) == rest


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [cut, lambda path: path.unlink()])
def test_a_damaged_file_is_named_or_skipped(kind, damage, write, caplog):
    paths = write(kind)
    damage(paths[1])
    with pytest.raises(
        errors.DataError, match=rf"^\[rank .\] Expected .*{paths[1].name}"
    ) as caught:
        sources_of(kind, paths, 2)
    assert "unreadable='skip'" in str(caught.value)
    parts = batches_of(kind, paths, 2, "skip")
    assert flat([epoch_of(part) for part in parts]) == [n for n in range(41) if not 11 <= n < 18]
    assert "skips 1 files" in caplog.text and paths[1].name in caplog.text


def test_a_sample_that_cannot_be_decoded_is_replaced_within_its_batch(tmp_path, capsys):
    paths = [write_tar(tmp_path, "0", range(8))]
    paths[0].write_bytes(paths[0].read_bytes().replace(b"5" + bytes(511), b"!" + bytes(511)))
    [part] = batches_of("tar", paths, 1, "skip", shuffle=False)
    assert epoch_of(part) == [[0, 1, 2, 3], [4, 6, 6, 7]]
    assert "005 in" in capsys.readouterr().out
    [part] = batches_of("tar", paths, 1, "skip", shuffle=False, batch_size=1)
    assert epoch_of(part) == [[0], [1], [2], [3], [4], [4], [6], [7]]
    [part] = batches_of("tar", paths, 1, "skip", shuffle=False, batch_size=1)
    with pytest.raises(errors.DataError, match=r"005 in .* Check the files"):
        part.batch(0, 5)


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        (NpzFiles, "z", "an array 'z' in"),
        (ParquetFiles, "z", "a column 'z' in"),
        (ParquetFiles, "text", "text string"),
        (ParquetFiles, "a\tx\t", "a int64, x fixed_size_list"),
    ],
)
def test_missing_or_unsuitable_data_is_named(kind, names, message, write):
    paths = write("npz" if kind is NpzFiles else "parquet")
    with pytest.raises(errors.DataError, match=r"^\[rank 0\] Expected .* Received: ") as caught:
        options = options_of(0, 1)
        source = ShardSource(kind(names, options), list(map(str, paths)), options, "skip", [])
        source.batches([source.held])
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", [lambda n: [n, None], lambda n: None if n == 3 else [n, n]])
def test_null_integers_are_an_error(missing, tmp_path):
    lists = pa.array([missing(n) for n in range(8)], pa.list_(pa.int64(), 2))
    pa.parquet.write_table(pa.table({"x": lists}), tmp_path / "0.parquet")
    options = options_of(0, 1)
    source = ShardSource(
        ParquetFiles("x", options), [str(tmp_path / "0.parquet")], options, "raise", []
    )
    with pytest.raises(errors.DataError, match=r"'x' of .* in row group 0\.") as caught:
        source.batches([source.held]).batch(0, 0)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint8(), pa.bool_()])
def test_a_null_is_named_with_its_column_and_row_group(kind, tmp_path):
    columns = {
        "x": pa.array([True, False, True, None]).cast(kind),
        "f": pa.array([1.0, None, 3.0, 4.0]),
    }
    path = str(tmp_path / "0.parquet")
    pa.parquet.write_table(pa.table(columns), path, row_group_size=2)
    options = options_of(0, 1, shuffle=False, batch_size=2)
    source = ShardSource(ParquetFiles(("x", "f"), options), [path], options, "raise", [])
    batches = source.batches([source.held])
    np.testing.assert_array_equal(batches.batch(0, 0)[1], [1, np.nan])
    with pytest.raises(
        errors.DataError, match=r"'x' of .*0\.parquet .* 1 in row group 1\."
    ) as caught:
        batches.batch(0, 1)
    assert "damaged" not in str(caught.value) and str(kind) in str(caught.value)


def test_arrays_of_files_have_native_byte_order(tmp_path):
    expected = np.arange(4)
    for number, dtype in enumerate((">i8", "<i8")):
        np.savez(tmp_path / f"{number}.npz", x=expected.astype(dtype), y=expected.astype(">f4"))
    options = options_of(0, 1, shuffle=False)
    paths = [str(tmp_path / f"{number}.npz") for number in range(2)]
    source = ShardSource(NpzFiles(("x", "y"), options), paths, options, "raise", [])
    for step in range(2):
        x, y = source.batches([source.held]).batch(0, step)
        assert x.dtype == np.int64 and x.dtype.isnative and y.dtype.isnative
        assert x.tolist() == y.tolist() == expected.tolist()


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
    paths = list(map(str, write("parquet", (5,))))
    for names, shape in (("a", ()), (["a"], (1,)), (["a", "y"], (2,))):
        part = parquet(paths, names, batch_size=5, shuffle=False)
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


def images_of(images, size, mode="int", policy="raise", own=False, frame=None, **arguments):
    """Returns batches and classes of each rank, given the images of each rank."""
    frame = frame or {}
    options = [options_of(rank, size, **arguments) for rank in range(size)]
    found = [
        listed(each, frame.get("directory"), "file", frame.get("y", "kind"), mode, its)
        for each, its in zip(images, options, strict=True)
    ]
    made = [Classes(each, mode, None, own, its) for each, its in zip(found, options, strict=True)]
    parts = [each.part([other.held for other in made]) for each in made]
    sources = [
        ShardSource(
            ImageFiles(each, labels_of(each, classes, mode), (4, 6), "rgb", policy, its),
            each.paths,
            its,
            policy,
            [Fact("mode", mode)],
            own,
            visible=False,
        )
        for (each, classes), its in zip(parts, options, strict=True)
    ]
    batches = [source.batches([other.held for other in sources]) for source in sources]
    return batches, [classes for _, classes in parts]


def pairs_of(batches, epoch=0):
    """Returns grey and label of each image of an epoch."""
    made = [batches.batch(epoch, step) for step in range(batches.plan.steps)]
    assert all(x.shape[1:] == (4, 6, 3) and x.dtype == np.float32 for x, _ in made)
    return [(int(x[0, 0, 0]), y.tolist()) for xs, ys in made for x, y in zip(xs, ys, strict=True)]


LABELS = {**dict.fromkeys(range(1, 10), 1), 10: 0, 11: 0, **dict.fromkeys(range(12, 17), 2)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_images_of_a_directory_come_once_with_sorted_classes(size, tree):
    batches, classes = images_of([str(tree)] * size, size)
    assert classes == [["a", "b", "c"]] * size
    epochs = [pairs_of(each) for each in batches]
    assert sorted(pair for epoch in epochs for pair in epoch) == sorted(LABELS.items())
    assert epochs != [pairs_of(each, 1) for each in batches]


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
    files = ImageFiles(None, None, (2, 2), mode, "raise", options_of(0, 1))
    found = files._decode(Location(0, 0, str(tmp_path / "0.png")))
    [batch] = keras.utils.image_dataset_from_directory(
        tmp_path, labels=None, color_mode=mode, image_size=(2, 2), verbose=False
    )
    # Pillow and TensorFlow round the grey of a colour differently.
    np.testing.assert_allclose(found, np.array(batch)[0], atol=1 if kind == "palette" else 0)
    if kind == "grey of 16 bits":
        assert found[..., 0].tolist() == [[0, 3], [156, 255]]


def test_labels_have_the_form_of_keras(tree):
    [batches], _ = images_of([str(tree)], 1, "categorical", shuffle=False)
    assert pairs_of(batches)[0] == (10, [1.0, 0.0, 0.0])
    [batches], _ = images_of([str(tree)], 1, None, shuffle=False)
    assert batches.batch(0, 0).shape == (4, 4, 6, 3)
    with pytest.raises(errors.DataError, match="two classes"):
        images_of([str(tree)], 1, "binary")


def test_a_dataframe_lists_images_with_classes_or_values(tree):
    frame = pandas.DataFrame({"file": ["b/0.png", "a/0.png", "b/0.png"], "kind": [7, 5, 7]})
    frame["value"] = [0.5, 1.5, 2.5]
    [batches], [classes] = images_of([frame], 1, frame={"directory": tree}, shuffle=False)
    assert classes == ["5", "7"] and pairs_of(batches) == [(1, 1), (10, 0), (1, 1)]
    options = {"directory": tree, "y": ["value", "kind"]}
    [batches], _ = images_of([frame], 1, "raw", frame=options, shuffle=False)
    assert pairs_of(batches) == [(1, [0.5, 7.0]), (10, [1.5, 5.0]), (1, [2.5, 7.0])]
    with pytest.raises(errors.DataError, match="a column 'grade'"):
        images_of([frame], 1, frame={"directory": tree, "y": "grade"})


def test_ranks_with_own_images_number_classes_equally(tree):
    mine = [tree / "one", tree / "two"]
    for folder, names in zip(mine, ("ab", "c"), strict=True):
        folder.mkdir()
        for name in names:
            (tree / name).rename(folder / name)
    batches, classes = images_of(list(map(str, mine)), 2, own=True)
    assert classes == [["a", "b", "c"]] * 2
    epochs = [pairs_of(each) for each in batches]
    assert sorted(pair for epoch in epochs for pair in epoch) == sorted(LABELS.items())
    assert batches[0].plan.steps == batches[1].plan.steps
    with pytest.raises(errors.ArgumentError, match=r"shuffle='global'.*Pass samples to shard\(\)"):
        images_of(list(map(str, mine)), 2, own=True, shuffle="global")


def test_damaged_images_are_named_or_skipped(tree, caplog, capsys):
    (tree / "a" / "0.png").write_text("no image")
    whole = (tree / "b" / "0.png").read_bytes()
    (tree / "b" / "0.png").write_bytes(whole[:-30])  # its header can be read
    with pytest.raises(errors.DataError, match=r"^\[rank 0\] Expected .*a/0\.png to be readable"):
        images_of([str(tree)] * 2, 2)
    batches, _ = images_of([str(tree)] * 2, 2, policy="skip")
    assert "skips 1 files" in caplog.text
    pairs = [pair for each in batches for pair in pairs_of(each)]
    assert len(pairs) == 15 and set(pairs) == set(LABELS.items()) - {(10, 0), (1, 1)}
    assert "b/0.png is skipped" in capsys.readouterr().out
    (tree / "a" / "0.png").unlink()
    batches, _ = images_of([str(tree)] * 2, 2)
    with pytest.raises(errors.DataError, match=r"b/0\.png to be readable"):
        [pairs_of(each) for each in batches]


def test_a_sample_whose_name_is_not_valid_text_is_skipped(capsys):
    def decode(place):
        if place == 1:
            raise OSError("cut off")
        return np.array(place)

    decoder = Decoder(decode, lambda place: f"image-\udcff-{place}", "skip")
    assert decoder.batch([0, 1, 2]).tolist() == [0, 2, 2]
    assert "image-\\udcff-1 is skipped, 1 so far" in capsys.readouterr().out
