"""The mpiexec command of a job: hosts, number of ranks, environment, and the program."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from keras_dist import errors
from keras_dist.launch.cli.hosts import (
    Allocation,
    allocation,
    argument_error,
    check_names,
    check_reach,
    parse_hosts,
    read_hostfile,
    ssh_of_mpiexec,
)
from keras_dist.launch.cli.mpiexec import Library, find_mpiexec, mpiexec_options
from keras_dist.runtime import launch_environment

OWN = "KERAS_"  # needed on every host
# These describe this host, terminal or process only.
LOCAL = tuple(
    "OMPI_ PMIX_ PRTE_ PMI_ SLURM PBS_ LSB_ LSF_ SSH_ XDG_ DBUS_ BASH_FUNC_ "
    "HOSTNAME PWD OLDPWD DISPLAY TERM SHLVL LS_COLORS TMPDIR CUDA_VISIBLE_DEVICES".split()
)
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
NOTEBOOK = ("-m", "keras_dist.launch.cli", "run-notebook")

PLAIN = ("-u", "-O", "-OO", "-B")  # options of Python


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of `--env` that come with a value."""
    return dict(word.split("=", 1) for word in options.env if "=" in word)


def number_of_ranks(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Returns the number of ranks from options, hosts or batch system."""
    return _ranks(options.np, _named_hosts(options), allocation(environment))


def ssh_of_job(options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Returns the ssh by which mpiexec enters hosts; `None` where it may do so by other means."""
    names_hosts = (
        options.hosts or options.hostfile or getattr(options, "host_discovery_script", None)
    )
    if not names_hosts or allocation(environment) is not None or options.mpi_args:
        return None
    return ssh_of_mpiexec(environment)


def hosts_of_job(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str] | None:
    """Returns the names of the hosts as far as they are known; `None` if it is this one only."""
    given = allocation(environment)
    script = getattr(options, "host_discovery_script", None)
    if not (options.hosts or options.hostfile or script or given or options.mpi_args):
        return None
    return [*_named_hosts(options), *(given.hosts if given is not None else ())]


def check_entry(options: argparse.Namespace, ssh: str | None) -> None:
    """Enters the hosts of options."""
    if ssh is not None:
        check_reach(_named_hosts(options), ssh)


def job_command(
    options: argparse.Namespace,
    library: Library,
    program: Sequence[str],
    environment: Mapping[str, str],
    survives_rank_loss: bool = False,
    binds: bool = True,
) -> list[str]:
    """Returns the command line of mpiexec, which ends in the program."""
    _check_not_a_rank(environment)
    given = allocation(environment)
    hosts = _named_hosts(options)
    if hosts and not getattr(options, "dry_run", False):
        check_names(hosts)
    ranks = _ranks(options.np, hosts, given)
    if not hosts and given is not None and given.hosts:
        slots = _slots(given, ranks)
        _check_slots(ranks, slots, f"the hosts of {given.system}")
        # Hydra asks the batch system itself; Open MPI may be built without support for it.
        hosts = slots if library.is_open_mpi else {}
    elif hosts:
        _check_slots(ranks, hosts, "the hosts")
    elsewhere = bool(hosts) or given is not None
    words = mpiexec_options(
        library, ranks, _passed(options, environment, elsewhere), survives_rank_loss, hosts, binds
    )
    return [find_mpiexec(library), *words, *(options.mpi_args or []), *program]


def _named_hosts(options: argparse.Namespace) -> dict[str, int]:
    if options.hosts is not None and options.hostfile is not None:
        raise argument_error("--hosts or --hostfile", "both", "Leave one of them out.")
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return {} if options.hostfile is None else read_hostfile(options.hostfile)


def _ranks(wanted: int | None, hosts: Mapping[str, int], given: Allocation | None) -> int:
    if wanted is not None:
        return wanted
    if hosts:
        return sum(hosts.values())
    if given is not None and given.ranks is not None:
        return given.ranks
    raise argument_error("the number of ranks", "none", "Pass -np 2, for example.")


def _slots(given: Allocation, ranks: int) -> dict[str, int]:
    """Returns the ranks of each host of an allocation, distributed evenly if it does not say."""
    if given.ranks is not None:
        return dict(given.hosts)
    share = -(-ranks // len(given.hosts))
    return dict.fromkeys(given.hosts, share)


def _check_slots(ranks: int, hosts: Mapping[str, int], whose: str) -> None:
    if ranks > sum(hosts.values()):
        slots = ", ".join(f"{name}:{count}" for name, count in hosts.items())
        raise argument_error(
            f"at most as many ranks as {whose} have slots ({slots})",
            f"-np {ranks}",
            "Start fewer ranks, or name the hosts with more slots: --hosts h1:4,h2:4.",
        )


def _passed(
    options: argparse.Namespace, environment: Mapping[str, str], elsewhere: bool
) -> list[str]:
    """Returns the names of the variables that are passed to ranks on other hosts."""
    asked = {word.partition("=")[0] for word in options.env}
    if missing := sorted(asked - set(environment)):
        raise argument_error(
            "variables that are set", f"--env {missing[0]}", f"Pass --env {missing[0]}=VALUE."
        )
    meant = {
        name
        for name in environment
        if name.startswith(OWN)
        or (elsewhere and name.isidentifier() and not name.startswith(LOCAL) and name != "_")
    }
    return sorted(asked | meant)


def _check_not_a_rank(environment: Mapping[str, str]) -> None:
    announced = launch_environment.announced_size(environment)
    if announced is not None and announced.variable in LAUNCHERS and announced.size > 1:
        raise errors.LaunchError(
            "[keras-dist]",
            "a process that is not itself a rank",
            f"one of {announced.size}, started by {announced.launcher} ({announced.variable})",
            f"Use only one of the two launchers: either {sys.argv[0]}, or the one around it.",
        )


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the program."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def program_of(options: argparse.Namespace, command: str) -> list[str]:
    """Returns the command of each rank."""
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if options.module is not None:
        words = [sys.executable, "-m", *options.module] if options.module else []
    elif words and words[0].endswith(".py"):
        words = [sys.executable, *words]
    elif words and words[0].endswith(".ipynb"):
        words = [sys.executable, *NOTEBOOK, *words]
    if (missing := _missing(words)) is None:
        return words
    raise errors.ArgumentError(
        f"[keras-dist {command.split()[0]}]",
        "a program to start",
        missing,
        f"Put it after the options, for example: keras-dist {command} python train.py --epochs 3",
    )


def words_of_python(program: list[str]) -> int:
    """Returns the number of words before a script or `-m` that this Python runs; else 0."""
    found = shutil.which(program[0]) or ""
    count = 1
    while program[count:] and program[count] in PLAIN:
        count += 1
    word = "".join(program[count : count + 1])
    runs = (word == "-m" and len(program) > count + 1) or (
        word.endswith(".py") and os.path.isfile(word)
    )
    is_this = os.path.exists(found) and os.path.samefile(found, sys.executable)
    # The Pythons of virtual environments are links to the same file.
    beside = os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
    return count if runs and is_this and beside else 0


def _missing(words: list[str]) -> str | None:
    """Returns what was given instead of a program; `None` for a valid program."""
    if not words:
        return "none"
    if shutil.which(words[0]) is None:
        return repr(words[0])
    if os.path.basename(words[0]).startswith("python"):
        behind = len(NOTEBOOK) if tuple(words[1 : 1 + len(NOTEBOOK)]) == NOTEBOOK else 0
        script = next((word for word in words[1 + behind :] if not word.startswith("-")), "")
        if script.endswith((".py", ".ipynb")) and not os.path.isfile(script):
            return f"{script!r}, which does not exist"
    return None
