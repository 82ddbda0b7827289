"""`keras-dist doctor`: checks whether jobs can run here, and gives remedies."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_dist import _gpu, errors
from keras_dist._version import __version__
from keras_dist.launch.cli import backends
from keras_dist.launch.cli.bench import measure
from keras_dist.launch.cli.hosts import allocation
from keras_dist.launch.cli.mpiexec import Library, find_mpiexec, load_library
from keras_dist.launch.cli.options import add_host_options

NBYTES = 16 * 2**20  # of the test reduction
WIDTH = 15
GIB = 2**30
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SHARED_MEMORY = Path("/dev/shm")
INTERFACES = Path("/sys/class/net")
# Settings that select an interface, of UCX, libfabric and Open MPI.
SELECTIONS = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
ENOUGH_GIB = 1  # for the gradients of four ranks of a model of 50 million parameters


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding."""

    what: str
    text: str
    remedy: str = ""
    is_trouble: bool = False


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        name,
        description="Checks packages, host and MPI, and starts two ranks. The exit code is 1 if "
        "no job can run.",
        allow_abbrev=False,
    )
    parser.set_defaults(act=_print_findings)
    add_host_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _print_findings(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if jobs can run, else 1."""
    troubles, told = 0, []
    for finding in _findings(options):
        troubles += finding.is_trouble
        told.append(dataclasses.asdict(finding))
        if not options.json:
            _print(finding)
    if options.json:
        print(json.dumps({"is_well": not troubles, "findings": told}, indent=2))
    elif not troubles:
        print(f"{'Start a job':{WIDTH}}keras-dist run -np 2 python train.py")
    return 1 if troubles else 0


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from of_the_packages()
    try:
        yield from of_the_machine()
        yield from of_the_launcher()
        begin = time.monotonic()
        found = measure(options, 2, [NBYTES])
        yield from of_a_job(found, time.monotonic() - begin)
    except (errors.LaunchError, errors.ArgumentError) as error:
        yield Finding("Trouble", str(error), "No job can run until this is fixed.", True)


def _print(finding: Finding) -> None:
    print(f"{finding.what:{WIDTH}}{finding.text}", flush=True)
    if finding.remedy:
        print(f"{'':{WIDTH - 3}}{'!!' if finding.is_trouble else '->'} {finding.remedy}")


def of_the_packages() -> Iterator[Finding]:
    """Yields the installed packages, and whether the selected backend of Keras is installed."""
    yield Finding("keras_dist", __version__)
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    libraries = {name: backends.version((name,)) for name in ("keras", "numpy", "mpi4py")}
    yield Finding("Packages", ", ".join(f"{name} {text}" for name, text in libraries.items()))
    there = backends.installed()
    text = ", ".join(f"{name} {version}" for name, version in there.items()) or "none"
    wanted = backends.wanted(os.environ)
    if wanted in there:
        yield Finding("Backends", f"{text}; Keras selects {wanted}", _without_bytecode())
        return
    trouble = f"{text}; Keras would select {wanted}"
    yield Finding("Backends", trouble, backends.remedy(wanted), is_trouble=True)


def _without_bytecode() -> str:
    """Returns a remedy if each rank compiles the sources of Keras; an empty string otherwise."""
    # uv does not compile what it installs, and images of containers often set
    # `PYTHONDONTWRITEBYTECODE`. An import then takes three times as long.
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        return ""
    compiled = Path(importlib.util.cache_from_source(spec.origin))
    folder = next(folder for folder in compiled.parents if folder.exists())
    if compiled.exists() or (not sys.dont_write_bytecode and os.access(folder, os.W_OK)):
        return ""
    return (
        "Each rank compiles all packages that it imports, for seconds, as their bytecode is not "
        f"kept. Compile them once, as their owner: {sys.executable} -m compileall -q -j 0 "
        f"{Path(spec.origin).parents[1]}"
    )


def of_the_machine() -> Iterator[Finding]:
    """Yields cores, memory, GPUs and batch system of this host."""
    yield Finding("Host", f"{os.uname().nodename}, {platform.system()} {platform.release()}")
    yield _cores()
    if SHARED_MEMORY.is_dir():
        room = os.statvfs(SHARED_MEMORY)
        size, free = (n * room.f_frsize / GIB for n in (room.f_blocks, room.f_bavail))
        remedy = "Increase it: docker run --shm-size=8g, or a larger tmpfs on /dev/shm."
        text = f"{size:.1f} GiB in {SHARED_MEMORY}, {free:.1f} GiB free"
        yield Finding("Shared memory", text, remedy if free < ENOUGH_GIB else "")
    yield _gpus()
    yield _nccl()
    given = allocation(os.environ)
    if given is not None:
        hosts = ", ".join(f"{name}:{slots}" for name, slots in given.hosts.items())
        text = f"{given.system}, {given.ranks or 'any number of'} ranks on {hosts or 'its hosts'}"
        yield Finding("Batch system", text)


def of_the_launcher() -> Iterator[Finding]:
    """Yields the MPI library, its mpiexec, and the network that it may use."""
    library = load_library()
    yield Finding("MPI library", library.text)
    yield Finding("Launcher", f"{find_mpiexec(library)}, which belongs to it")
    survival = "end the job; --max-restarts restarts it (no ULFM)"
    if library.survives_rank_loss:
        survival = "training can continue without them: --on-failure continue (ULFM)"
    yield Finding("Dead ranks", survival)
    yield _network(library)


def of_a_job(found: Mapping[str, Any], seconds: float) -> Iterator[Finding]:
    """Yields the findings of a small job, which took some seconds."""
    hosts = ", ".join(found["hosts"])
    yield Finding("Two ranks", f"start, reduce correctly and end, in {seconds:.1f} s, on {hosts}")
    if found["several_threads"]:
        yield Finding("Threads", "MPI allows concurrent calls from threads (MPI_THREAD_MULTIPLE)")
    elif found["from_other_threads"]:
        remedy = "Stall reports name missing ranks only with MPI_THREAD_MULTIPLE."
        yield Finding(
            "Threads", "MPI allows calls from one thread at a time (MPI_THREAD_SERIALIZED)", remedy
        )
    else:
        remedy = "Use an MPI library built for MPI_THREAD_SERIALIZED or higher."
        yield Finding("Threads", "MPI allows calls from the main thread only", remedy, True)
    ((size, time),) = found["seconds"].items()
    nbytes = int(size)
    speed = f"{nbytes >> 20} MiB are reduced in {1e3 * time:.1f} ms, {nbytes / time / 1e9:.1f} GB/s"
    if found["shares_memory"]:
        yield Finding("Speed", f"{speed}, in shared memory")
    else:
        remedy = (
            "Ranks of one node share memory on x86 and aarch64 under Linux, with room in /dev/shm."
        )
        # With one rank on each host, no ranks could share memory.
        is_apart = found["ranks"] == len(found["hosts"])
        yield Finding("Speed", f"{speed}, through MPI", "" if is_apart else remedy)
    says = {True: "yes", False: "no", None: "unknown"}[found["cuda_aware"]]
    yield Finding("CUDA-aware", f"{says}; arrays of GPUs do not travel through MPI")
    yield _gpu_path(found["gpus"])


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = set()
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        with contextlib.suppress(OSError):
            cores.add(tuple((path / f"{n}_id").read_text() for n in ("physical_package", "core")))
    packages = len({package for package, _ in cores}) or 1
    nodes = len([*Path("/sys/devices/system/node").glob("node[0-9]*")]) or 1
    text = f"{len(cores) or os.cpu_count()} cores in {packages} package(s), {nodes} NUMA node(s)"
    return Finding("Cores", f"{text}; this process may use {allowed} of {os.cpu_count()} threads")


def _gpus() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(
            query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding("GPUs", "none according to nvidia-smi")
    if told.returncode != 0:
        remedy = "Ask the administrator: nvidia-smi and the driver do not match."
        return Finding("GPUs", " ".join((told.stdout + told.stderr).split())[:200], remedy)
    gpus = told.stdout.splitlines()
    text = f"{len(gpus)}: {'; '.join(gpus)}"
    is_without = backends.version(("tensorflow-cpu",)) is not None
    if is_without and backends.wanted(os.environ) == "tensorflow":
        return Finding("GPUs", text, "tensorflow-cpu does not use GPUs: pip install tensorflow.")
    return Finding("GPUs", text)


def _nccl() -> Finding:
    nccl = _gpu.load_nccl()
    if isinstance(nccl, str):
        return Finding("NCCL", f"cannot be used: {nccl}")
    version = _gpu.version_text(nccl.version())
    wheels = {name: backends.version((name,)) for name in NCCL_WHEELS}
    installed = {name: there for name, there in wheels.items() if there}
    found = ", ".join(f"{name} {there}" for name, there in installed.items())
    text = f"{version} in {nccl.path}; {found or 'no wheel'}"
    if installed and version not in installed.values():
        remedy = (
            "Another file than that of the wheel is loaded: check LD_LIBRARY_PATH and LD_PRELOAD, "
            "which select it."
        )
        return Finding("NCCL", text, remedy)
    return Finding("NCCL", text)


def _gpu_path(found: Mapping[str, Any]) -> Finding:
    """Returns which rank has which GPU, and how arrays of GPUs travel."""
    gpus = [f"rank {rank} has {gpu}" for rank, gpu in enumerate(found["ranks"]) if gpu]
    text = f"{', '.join(gpus)}; arrays travel {found['path']}" if gpus else "none"
    return Finding("GPUs of ranks", text)


def _network(library: Library) -> Finding:
    up = interfaces()
    chosen = {name: os.environ[name] for name in SELECTIONS if name in os.environ}
    speeds = {name: f" {speed / 1000:g} Gbit/s" if speed else "" for name, speed in up.items()}
    text = ", ".join(f"{name}{speed}" for name, speed in speeds.items()) or "no interface is up"
    text += "".join(f"; {name}={value}" for name, value in chosen.items())
    if chosen or len(up) < 2:
        return Finding("Network", text)
    fastest = max(up, key=lambda name: up[name])
    if library.is_open_mpi:
        way = f"keras-dist run --mpi-args '--mca btl_tcp_if_include {fastest}'"
    else:
        variables = f"UCX_NET_DEVICES={fastest} FI_TCP_IFACE={fastest}"
        way = f"{variables} in the environment of keras-dist run"
    remedy = (
        "MPI selects among several interfaces, which may be the wrong one between hosts. To use "
        f"{fastest} only: {way}."
    )
    return Finding("Network", text, remedy)


def interfaces() -> dict[str, int]:
    """Returns the interfaces that are up, and their speed in Mbit/s; 0 if unknown."""
    found = {}
    for path in sorted(INTERFACES.glob("*")):
        with contextlib.suppress(OSError, ValueError):  # virtual interfaces have no speed
            if path.name != "lo" and (path / "operstate").read_text().strip() in ("up", "unknown"):
                found[path.name] = 0
                found[path.name] = max(0, int((path / "speed").read_text()))
    return found
