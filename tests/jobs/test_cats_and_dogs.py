"""The images of examples/cats_vs_dogs: drawings, and untrusted archives."""

import csv
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from start_jobs import SCRIPTS, lean, run, told

EXAMPLE = Path(__file__).parents[2] / "examples" / "cats_vs_dogs"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("archive", "drawings"):
        sys.modules.pop(name, None)


def pack(path, contents, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, content in contents:
            archive.writestr(name, content)
    return path


def refused(tmp_path, contents):
    from archive import unpack

    with pytest.raises(ValueError) as error:
        unpack(pack(tmp_path / "a.zip", contents), tmp_path / "cache" / "out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.zip"]
    assert not (tmp_path / "cache" / "out").exists()
    return str(error.value)


def test_pictures_are_unpacked_under_names_of_their_own(tmp_path):
    from archive import unpack

    names = ("train/cat.0.jpg", "PetImages/Dog/07.jpg", "Cat/Thumbs.db", "dog.x.jpg", "readme.txt")
    unpack(pack(tmp_path / "a.zip", [(name, name) for name in names]), tmp_path / "out")
    found = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert found == {"cat.0.jpg": "train/cat.0.jpg", "dog.7.jpg": "PetImages/Dog/07.jpg"}
    unpack(tmp_path / "it is not read again", tmp_path / "out")


OUT = "leads out of the archive"


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ([("cat.0.jpg", b"x"), ("../cat.1.jpg", b"x")], OUT),
        ([("cat.0.jpg", b"x"), ("/tmp/cat.1.jpg", b"x")], OUT),
        ([("a/../../cat.1.jpg", b"x")], OUT),
        ([("..\\cat.1.jpg", b"x")], OUT),
        ([("C:/cat.1.jpg", b"x")], OUT),
        ([("cat.0.jpg", bytes(10 << 20))], "that is no photograph"),
        ([("cat.1.jpg", b"x"), ("b/Cat.01.JPG", b"y")], "two files are to become cat.1.jpg"),
        ([("./", b""), ("1.jpg", b"x")], "no files called cat.N.jpg"),
    ],
)
def test_an_archive_that_cannot_be_right_is_refused(tmp_path, contents, reason):
    assert reason in refused(tmp_path, contents)


def test_limits_on_the_whole_archive(tmp_path, monkeypatch):
    import archive

    two = [("cat.0.jpg", b"0123456789"), ("dog.0.jpg", b"0123456789")]
    monkeypatch.setattr(archive, "MAX_NBYTES", 15)
    assert "more than" in refused(tmp_path, two)
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    assert "2 files" in refused(tmp_path, two)


def test_a_size_that_lies_is_found_out(tmp_path):
    from archive import unpack

    path = pack(tmp_path / "a.zip", [("cat.0.jpg", bytes(100_000))])
    lying = path.read_bytes().replace((100_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(lying)
    with pytest.raises(ValueError, match="damaged"):
        unpack(path, tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["a.zip"]


def test_what_is_no_archive_is_said_to_be_none(tmp_path):
    from archive import unpack

    (tmp_path / "a.zip").write_text("nothing")
    with pytest.raises(ValueError, match="not a zip archive, or is damaged"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_drawings_are_the_same_each_time_and_shared_out(tmp_path):
    from drawings import draw, draw_files

    assert draw("cat", 5) == draw("cat", 5)
    assert len({draw(category, 5) for category in ("cat", "dog")}) == 2
    assert Image.open(io.BytesIO(draw("dog", 5))).format == "JPEG"

    files = draw_files(tmp_path, 6, slice(0, None, 2))
    assert [file.name for file in files if file.exists()] == ["cat.0.jpg", "cat.1.jpg", "cat.2.jpg"]
    assert draw_files(tmp_path, 6) == files
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert files[3].read_bytes() == draw("dog", 1)


def environment(folder, **variables):
    """Returns the variables of a job with the packages of the example, which keeps files there."""
    places = {"KERAS_HOME": str(folder / "cache"), **variables}
    return lean("IPython", "matplotlib", "pandas", "sklearn", **places)


@pytest.mark.slow
def test_training_on_an_archive_with_a_damaged_picture(run_ranks, tmp_path):
    from drawings import draw

    pictures = [(f"{name}.{i}.jpg", draw(name, i)) for name in ("cat", "dog") for i in range(40)]
    pictures.append(("cat.99.jpg", pictures[0][1][:900]))
    archive, out = pack(tmp_path / "pictures.zip", pictures), tmp_path / "out"
    options = ["--smoke", "--data", str(archive), "--out", str(out), "--epochs", "1"]
    job = run_ranks(2, EXAMPLE / "train.py", *options, env=environment(tmp_path))
    told(
        job,
        r"Trained the small network on the pictures in .+pictures\.zip, 1 left out that are "
        r"damaged or no JPEG with 2 ranks: [\d,]+ images/s in total, "
        r"validation accuracy \d+\.\d%, all replicas are equal\.",
    )
    figures = ("confusion.png", "learning_curves.png", "predictions.png")
    written = {"cats_vs_dogs.keras", "history.csv", "predictions.csv", *figures}
    assert {path.name for path in out.iterdir()} == written
    assert all(Image.open(out / name).width > 300 for name in figures)
    with open(out / "predictions.csv") as rows:
        predicted = list(csv.DictReader(rows))
    assert len({row["file"] for row in predicted}) == len(predicted) == 16
    assert {row["category"] for row in predicted} == {"cat", "dog"}


@pytest.mark.slow
def test_archive_and_weights_are_taken_where_they_can_be_reached(tmp_path):
    from drawings import draw

    names = [(kind, number) for kind in ("Cat", "Dog") for number in range(2)]
    content = [(f"PetImages/{kind}/{n}.jpg", draw(kind.lower(), n)) for kind, n in names]
    (tmp_path / "served").mkdir()
    pack(tmp_path / "served" / "public.zip", content)
    path = os.pathsep.join(filter(None, [str(EXAMPLE), os.environ.get("PYTHONPATH", "")]))
    variables = environment(tmp_path, PYTHONPATH=path, no_proxy="127.0.0.1")
    ended = run([sys.executable, SCRIPTS / "fetched_images.py", tmp_path / "served"], env=variables)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("Cannot be downloaded: URL fetch failure on ") == 2
    assert "So the small network learns in place of MobileNetV2." in ended.stdout


def test_the_notebook_runs_on_two_ranks(run_ranks, tmp_path):
    small = {"data": "drawings", "drawings": 80, "image_size": 32, "epochs": 1}
    small["results"] = str(tmp_path / "results")
    values = [word for name, value in small.items() for word in ("-p", name, str(value))]
    executed = tmp_path / "executed.ipynb"
    command = ["run-notebook", EXAMPLE / "cats_vs_dogs.ipynb", "-o", executed, *values]
    job = run_ranks(2, "-m", "keras_dist.launch.cli", *command, env=environment(tmp_path))
    assert job.returncode == 0, job.stdout
    cells = [cell for cell in json.loads(executed.read_text())["cells"] if "outputs" in cell]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert "This is rank 0 of 2." in text
    assert "80 images: drawings" in text
    assert "macro avg" in text
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 5
    written = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert written == ["cats_vs_dogs.keras", "history.csv", "predictions.csv"]


def test_the_notebook_is_kept_without_outputs():
    notebook = json.loads((EXAMPLE / "cats_vs_dogs.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert [cell["metadata"].get("tags") for cell in code].count(["parameters"]) == 1
