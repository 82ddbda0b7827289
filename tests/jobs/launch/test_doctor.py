"""`keras-dist doctor` and `keras-dist bench`: results and missing requirements."""

import json
import os
import sys
import types
from pathlib import Path

import pytest

from keras_dist.launch.cli import bench, doctor, main
from keras_dist.launch.cli.mpiexec import load_library

pytestmark = pytest.mark.short

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


def found(capsys, *words, code=0):
    """Returns the texts and remedies of `doctor --json`, by check."""
    assert main(["doctor", "--json", *words]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["is_well"] == (code == 0)
    return {one["what"]: (one["text"], one["remedy"]) for one in told["findings"]}


def test_doctor_finds_what_runs_here(capsys, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    told = found(capsys)
    assert told["Launcher"] == (f"{MPIEXEC}, which belongs to it", "")
    assert told["MPI library"][0].startswith(("MPICH", "Open MPI"))
    assert "Keras selects" in told["Backends"][0]
    assert told["Two ranks"][0].startswith("start, reduce correctly and end, in ")
    assert told["Speed"][0].startswith("16 MiB are reduced in ")
    assert ("continue" in told["Dead ranks"][0]) == ("Open MPI v5" in told["MPI library"][0])
    assert {"Cores", "GPUs", "Threads", "CUDA-aware", "Network", "Shared memory"} <= set(told)


def test_doctor_tells_that_each_rank_compiles_the_packages(monkeypatch, tmp_path):
    def remedy():
        return {each.what: each.remedy for each in doctor.of_the_packages()}["Backends"]

    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert f"{sys.executable} -m compileall -q -j 0 /" in remedy()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert remedy() == ""


def test_doctor_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
    smi.chmod(0o755)
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    told = found(capsys, code=1)
    assert "Keras would select theano" in told["Backends"][0]
    assert "set KERAS_BACKEND=" in told["Backends"][1]
    assert told["GPUs"][0] == "1: NVIDIA H100, 81559 MiB"
    assert told["Batch system"][0] == "PBS, 2 ranks on n1:2"
    assert "Expected the mpiexec of" in told["Trouble"][0]
    assert "Two ranks" not in told
    nodes.unlink()
    told = found(capsys, code=1)
    assert f"Received: {nodes}: [Errno 2] No such file" in told["Trouble"][0]
    assert told["Trouble"][1] == "No job can run until this is fixed."
    assert "GPUs" in told


def found_by_a_job(**facts):
    """Returns the findings of a job of two ranks, by check."""
    usual = {
        "ranks": 2,
        "hosts": ["h1"],
        "seconds": {"16777216": 0.002},
        "cuda_aware": None,
        "gpus": {"ranks": ["", ""], "path": ""},
        **dict.fromkeys(("several_threads", "from_other_threads", "shares_memory"), True),
    }
    return {one.what: one for one in doctor.of_a_job({**usual, **facts}, 1.0)}


NOWHERE = {"several_threads": False, "from_other_threads": False}
SHARED = "Ranks of one node share memory on x86 and aarch64 under Linux, with room in /dev/shm."


@pytest.mark.parametrize(
    ("facts", "what", "remedy"),
    [
        ({"several_threads": False}, "Threads", "Stall reports name missing ranks only with"),
        (NOWHERE, "Threads", "Use an MPI library built for MPI_THREAD_SERIALIZED or higher."),
        ({"shares_memory": False}, "Speed", SHARED),
        ({"shares_memory": False, "hosts": ["h1", "h2"], "ranks": 3}, "Speed", SHARED),
        ({"shares_memory": False, "hosts": ["h1", "h2"]}, "Speed", ""),  # a rank on each host
    ],
)
def test_what_a_job_finds_has_a_remedy(facts, what, remedy):
    told = found_by_a_job(**facts)
    assert told[what].remedy.startswith(remedy) and bool(told[what].remedy) == bool(remedy)
    assert told[what].is_trouble == (facts is NOWHERE)
    assert "16 MiB are reduced in 2.0 ms, 8.4 GB/s" in told["Speed"].text
    assert told["Speed"].text.endswith(", through MPI") == ("shares_memory" in facts)


def test_doctor_shows_which_rank_has_which_gpu():
    gpus = {"ranks": ["0000:0a:00.0 of n1", "0000:0b:00.0 of n1"], "path": "by NCCL: 2 ranks"}
    found = doctor._gpu_path(gpus)
    ranks = "rank 0 has 0000:0a:00.0 of n1, rank 1 has 0000:0b:00.0 of n1"
    assert found.text == f"{ranks}; arrays travel by NCCL: 2 ranks"


def test_doctor_names_the_version_of_nccl(monkeypatch):
    assert doctor._nccl().text == "cannot be used: there is neither NCCL nor RCCL"
    nccl = types.SimpleNamespace(version=lambda: 22304, path="/lib/libnccl.so.2")
    monkeypatch.setattr(doctor._gpu, "load_nccl", lambda: nccl)
    monkeypatch.setattr(doctor.backends, "version", {("nvidia-nccl-cu13",): "2.23.4"}.get)
    text = "2.23.4 in /lib/libnccl.so.2; nvidia-nccl-cu13 2.23.4"
    assert doctor._nccl() == doctor.Finding("NCCL", text)
    monkeypatch.setattr(doctor.backends, "version", {("nvidia-nccl-cu12",): "2.27.3"}.get)
    found = doctor._nccl()
    assert found.text == "2.23.4 in /lib/libnccl.so.2; nvidia-nccl-cu12 2.27.3"
    assert "LD_LIBRARY_PATH" in found.remedy


@pytest.fixture
def network(monkeypatch, tmp_path):
    """The text and remedy for interfaces, given by name as their state and speed."""
    for name in doctor.SELECTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "INTERFACES", tmp_path)

    def told(**states):
        for name, (state, speed) in states.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "operstate").write_text(state)
            (tmp_path / name / "speed").write_text(speed)
        (one,) = [each for each in doctor.of_the_launcher() if each.what == "Network"]
        return one.text, one.remedy

    return told


def test_doctor_says_how_to_select_one_of_several_networks(network, monkeypatch):
    assert network() == ("no interface is up", "")
    assert network(lo=("unknown", ""), eth0=("up", "1000")) == ("eth0 1 Gbit/s", "")
    text, remedy = network(eth1=("down", "-1"), ib0=("up", "100000"), veth0=("unknown", "-1"))
    assert text == "eth0 1 Gbit/s, ib0 100 Gbit/s, veth0"
    assert "To use ib0 only: " in remedy
    variable = "btl_tcp_if_include ib0" if load_library().is_open_mpi else "UCX_NET_DEVICES=ib0"
    assert variable in remedy
    monkeypatch.setenv("UCX_NET_DEVICES", "ib0")
    assert network() == (f"{text}; UCX_NET_DEVICES=ib0", "")


def test_bench_measures_each_size(capsys):
    words = "-np 2 --sizes 4K 1M --parameters 1M".split()
    assert main(["bench", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["seconds"]["2"]) == {"4096", str(2**20), "4000000"}
    assert min(told["seconds"]["2"].values()) > 0


def test_bench_prints_a_table(monkeypatch, capsys):
    def measure(options, ranks, sizes):
        return {
            "library": "MPI",
            "hosts": ["h1"],
            "seconds": {str(n): ranks * n / 1e9 for n in sizes},
        }

    monkeypatch.setattr(bench, "measure", measure)
    assert main("bench -np 6 --sizes 1M --parameters 1M".split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("6 ranks") == 1
    rows = [line.split() for line in printed.splitlines()]
    assert ["1", "MiB", "2.097", "(0.5)", "4.194", "(0.2)", "6.291", "(0.2)"] in rows
    assert ["3.815", "MiB", "8.000", "(0.5)", "16.000", "(0.2)", "24.000", "(0.2)"] in rows


@pytest.mark.parametrize("words", ["--parameters many", "--sizes 1"])
def test_wrong_arguments_are_refused(words):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words.split()])
    assert ended.value.code == 2
