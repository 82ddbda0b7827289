"""The hosts of `keras-dist run`: given by options or by a batch system."""

import argparse
import errno
import io
import re
import shlex
import sys
import time

import pytest

from keras_dist import errors
from keras_dist.launch.cli import discovery, mpiexec
from keras_dist.launch.cli.command import job_command
from keras_dist.launch.cli.hosts import parse_hosts, read_hostfile
from keras_dist.launch.cli.options import add_host_options

OPEN_MPI = mpiexec.Library("Open MPI", (5, 0), "Open MPI v5.0")
MPICH = mpiexec.Library("MPICH", (4, 2), "MPICH 4.2")
INTEL = mpiexec.Library("Intel MPI", (2021, 14), "Intel(R) MPI Library 2021.14")


def test_a_launcher_goes_on_if_nobody_reads_what_it_says(monkeypatch):
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Broken())
    discovery.tell("the job failed.")
    assert sys.stderr.getvalue() == "keras-dist: the job failed.\n"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """A function that returns the command for options, an MPI library and an environment."""
    says = {"Open MPI": "mpiexec (Open MPI) 5.0.8", "MPICH": "HYDRA", "Intel MPI": "Intel(R) MPI"}
    for library, text in says.items():
        folder = tmp_path / "bin" / library
        folder.mkdir(parents=True)
        (folder / "mpiexec").write_text(f"#!/bin/sh\necho '{text}'\n")
        (folder / "mpirun").write_text("#!/bin/sh\necho another\n")
        for path in folder.iterdir():
            path.chmod(0o755)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-3]' ] && printf 'n1\\nn2\\nn3\\n'\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    parser = argparse.ArgumentParser()
    add_host_options(parser)

    def run(library, words="", **environment):
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin' / library.vendor}:{tmp_path / 'bin'}:/bin")
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        options = parser.parse_args(words.split(), argparse.Namespace(dry_run=True))
        found = job_command(options, library, ["true"], environment, binds=False)
        assert found[0] == str(tmp_path / "bin" / library.vendor / "mpiexec")
        return shlex.join(found[1:])

    return run


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def test_an_allocation_of_slurm_is_used(command):
    tasks = {**SLURM, "SLURM_NTASKS": "10"}
    assert command(OPEN_MPI, **tasks) == "-n 10 --host n1:4,n2:4,n3:2 --bind-to none true"
    assert command(MPICH, **tasks) == "-n 10 true"  # Hydra queries Slurm itself
    assert command(OPEN_MPI, "-n 4 -H n1:4", **tasks) == "-n 4 --host n1:4 --bind-to none true"
    with pytest.raises(
        errors.ArgumentError, match=r"the hosts of Slurm have slots \(n1:4, n2:4, n3:2\)"
    ):
        command(OPEN_MPI, "-n 11", **tasks)
    unknown = {**tasks, "SLURM_JOB_NODELIST": "-x"}  # then mpiexec needs the hosts
    assert command(OPEN_MPI, **unknown) == "-n 10 --bind-to none true"


def test_an_allocation_of_pbs_is_used(command, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.example.org\nn1.example.org\nn2.example.org\nn2.example.org\n")
    hosts = "--host n1.example.org:2,n2.example.org:2"
    assert f"-n 4 {hosts} " in command(OPEN_MPI, PBS_NODEFILE=str(nodes))
    nodes.write_text("n1\nn2\n")  # nodes without numbers of ranks
    assert "-n 7 --host n1:4,n2:4 " in command(OPEN_MPI, "-n 7", PBS_NODEFILE=str(nodes))
    with pytest.raises(errors.ArgumentError, match="Expected the number of ranks"):
        command(OPEN_MPI, PBS_NODEFILE=str(nodes))


def test_an_allocation_of_lsf_is_used(command, tmp_path, monkeypatch):
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    assert "-n 3 --host n1:2,n2:1 " in command(OPEN_MPI, LSB_DJOB_HOSTFILE=str(nodes))
    assert command(INTEL, LSB_DJOB_HOSTFILE=str(nodes)) == "-n 3 true"
    monkeypatch.delenv("LSB_DJOB_HOSTFILE")
    assert "-n 6 --host n1:4,n2:2 " in command(OPEN_MPI, LSB_MCPU_HOSTS="n1 4 n2 2")


def test_named_hosts_are_told_to_each_mpiexec_in_its_own_way(command):
    assert command(MPICH, "-H h1:2,h2:2") == "-n 4 -hosts h1:2,h2:2 true"
    assert command(INTEL, "-H h1:2,h2:2") == "-n 4 -ppn 2 -hosts h1,h2 true"
    with pytest.raises(errors.LaunchError, match="the same number of ranks for each host"):
        command(INTEL, "-H h1:2,h2:1")
    passed = command(OPEN_MPI, "-H h1:2", HF_HOME="/x", SLURM_X="", HOSTNAME="h", CUDA="0 1")
    assert passed == "-n 2 --host h1:2 --bind-to none -x CUDA -x HF_HOME true"


def test_further_words_reach_mpiexec(command):
    assert command(MPICH, "-n 2 --mpi-args=-iface").endswith("-n 2 -iface true")


def test_a_rank_starts_no_job(command):
    with pytest.raises(errors.LaunchError, match="one of 2, started by Open MPI's mpirun"):
        command(OPEN_MPI, "-n 2", OMPI_COMM_WORLD_SIZE="2")


def test_hostfiles_of_both_kinds_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nh1 slots=4\nh2:2\n\nh3   # one\nh2 slots = 1 max_slots=8\n")
    assert read_hostfile(str(file)) == {"h1": 4, "h2": 3, "h3": 1}
    for text in ("", "h1 4:4:4 slots=x:1\nh 1:2:3", "h1:0", "-oProxyCommand=x"):
        file.write_text(text)
        with pytest.raises(errors.ArgumentError, match=r"each line of .*hosts to be like"):
            read_hostfile(str(file))
    with pytest.raises(errors.ArgumentError, match="No such file"):
        read_hostfile(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=touch", "h1;reboot", "$(reboot)", "h1 h2", "h1:x", "h1:0", "h1,,h2",
             "h1|x", "user@h1", "h1-", ".", ""],
)  # fmt: skip
def test_names_that_are_no_names_of_hosts_are_refused(text):
    with pytest.raises(errors.ArgumentError, match="Expected --hosts to be like h1:2,h2:2"):
        parse_hosts(text)


def test_a_host_that_nobody_knows_is_named_before_the_start(monkeypatch):
    from keras_dist.launch.cli import hosts

    hosts.check_names(["localhost"])
    for name in ("nowhere.invalid", "a..b", "x" * 64):
        with pytest.raises(errors.LaunchError, match=rf"'{re.escape(name)}': \w"):
            hosts.check_names(["localhost", name])


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A function that returns the hosts of a discovery script with one answer per call."""
    monkeypatch.setattr(discovery, "PAUSE_SECONDS", 0.0)
    script = tmp_path / "hosts.sh"
    script.write_text('#!/bin/sh\ncd "${0%/*}" || exit 9\ncat next\nmv then next\ntrue\n')
    script.chmod(0o755)

    def ask(first, then="h1:2", again=False, seconds=60):
        (tmp_path / "next").write_bytes(first)
        (tmp_path / "then").write_text(then)
        options = {"min_np": 1, "max_np": None, "np": None, "elastic_timeout": seconds}
        options = argparse.Namespace(host_discovery_script=[str(script)], **options)
        found = discovery.with_hosts(options, again, time.monotonic() + 60)
        return found.hosts, found.np

    return ask


@pytest.mark.parametrize(
    ("said", "received"), [(b"h1:2\nh2:x # two\n", "'h2:x'"), (b"\xff:2", "'\ufffd:2'")]
)
def test_a_script_that_names_no_host_is_told_so_and_asked_again_at_a_restart(asked, said, received):
    expected = f"hosts.sh to name 1 or more slots. Received: {received}. The script must print "
    with pytest.raises(errors.ArgumentError, match=re.escape(expected)):
        asked(said)
    assert asked(said, again=True) == ("h1:2", 2)
    with pytest.raises(errors.ArgumentError, match=re.escape(expected)):
        asked(said, then=said.decode(errors="replace"), again=True, seconds=0)


def test_a_script_may_comment_on_its_hosts(asked):
    assert asked(b"# two\nh1:1 # one\n\nh2 slots=3\n") == ("h1:1,h2:3", 4)
    assert asked(b"# none\n") == ("h1:2", 2)


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        ({"h1": 2, "h2": 1}, False),  # as at the start
        ({"h1": 3, "h2": 1}, True),
        ({"h1": 2, "h2": 1, "h3": 1}, True),
        ({"h2": 1, "h3": 3}, True),  # as many ranks, but h1 is gone
        ({"h1": 1, "h2": 1}, True),
        ({"h1": 1}, False),  # too few: the job goes on while it can
        ({}, False),
    ],
)
def test_a_job_changes_its_hosts_for_more_ranks_or_lost_slots(hosts, wanted):
    limits = {"min_np": 2, "max_np": 4, "np": None, "hostfile": None}
    watch = discovery.HostWatch(argparse.Namespace(host_discovery_script=["true"], **limits))
    watch.begin(argparse.Namespace(hosts="h1:2,h2:1", np=3))
    assert watch._wants(hosts) == wanted
    watch.begin(argparse.Namespace(hosts="h1:2,h2:9", np=4))
    assert not watch._wants({"h1": 2, "h2": 2, "h3": 5})  # as many as there may be
