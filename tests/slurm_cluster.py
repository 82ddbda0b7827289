"""A Slurm cluster on test hosts of this machine, one node on each."""

import contextlib
import os
import secrets
import shutil
import subprocess
from pathlib import Path

from namespaces import Unavailable, make_hosts
from start_jobs import HANG_SECONDS, wait_for

# The Debian package of each program or file that the cluster needs.
NEEDED = {
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so": "libpmix-dev",
}
# Character devices that every machine has stand for GPUs.
GPUS = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random"]

# Nodes share the file system: each has directories of its own (%n). `cred_expire` is also the delay
# before a requeued job starts, and by default Slurm looks for such jobs once a minute. On a machine
# with much to do, ranks need minutes after the signal.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
OverTimeLimit=10
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=30
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
NodeName={nodes} Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:{gpus} State=UNKNOWN
"""


class Cluster:
    """A running Slurm cluster.

    Args:
        folder: its configuration, state and logs.
        hosts: its nodes, of which the first runs slurmctld.
    """

    def __init__(self, folder, hosts):
        self.folder, self.hosts = folder, hosts
        self._variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command, **variables):
        """Runs a command on the first node; returns its output.

        Raises:
            AssertionError: it fails.
        """
        done = subprocess.run(
            [*self.hosts[0].enter, *map(str, command)],
            env={**os.environ, **self._variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def submit(self, script, *options, **variables):
        """Submits a batch script; returns the number of the job."""
        return int(self.run("sbatch", "--parsable", *options, script, **variables))

    def job(self, number):
        """Returns the fields of a job, as `scontrol show job` names them."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def limit(self, number, minutes):
        """Sets how many minutes a job may run from now on, counted in whole minutes."""
        hours, rest, _ = self.job(number)["RunTime"].split(":")
        limit = int(hours) * 60 + int(rest) + minutes
        self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")

    def cancel_all(self):
        """Ends all jobs, so that no job waits for the nodes of another test's."""
        self.run("scancel", "--user=root")
        assert wait_for(lambda: not self.run("squeue", "--noheader")), self.logs()

    def wait(self, number, *states):
        """Waits until a job is in one of the states; returns its fields."""
        ended = wait_for(lambda: self.job(number)["JobState"] in states, 2 * HANG_SECONDS)
        assert ended, f"{self.job(number)}\n{self.logs()}"
        return self.job(number)

    def logs(self):
        """Returns the ends of the logs of Slurm."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def start(self):
        """Starts the daemons and waits until all nodes are idle."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        names = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{name}={munge / file}" for name, file in names.items()]
        self._start(0, "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self._start(0, "slurmctld", "-D")
        for number, host in enumerate(self.hosts):
            for name in ("spool", "tmp"):
                (self.folder / f"{name}.{host.name}").mkdir()
            self._start(number, "slurmd", "-D", "-N", host.name)
        is_idle = wait_for(lambda: self._idle_nodes() == len(self.hosts))
        assert is_idle, f"no idle nodes\n{self.logs()}"

    def _start(self, number, *command):
        with open(self.folder / f"{Path(command[0]).name}-{number}.log", "w") as log:
            subprocess.Popen(  # ends with its host
                [*self.hosts[number].enter, *command],
                env={**os.environ, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _idle_nodes(self):
        with contextlib.suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--Node", "--states=idle").count("\n")
        return 0


@contextlib.contextmanager
def make_cluster(folder, nodes):
    """Makes a Slurm cluster with configuration, state and logs in a folder, and removes it.

    Raises:
        Unavailable: a package is missing, or hosts cannot be made; the text names the reason.
    """
    missing = [package for file, package in NEEDED.items() if not _is_installed(file)]
    if missing:
        raise Unavailable(f"Debian packages missing: {', '.join(missing)}")
    with make_hosts(nodes) as (hosts, _):
        text = CONFIGURATION.format(
            folder=folder,
            first=hosts[0].name,
            nodes=f"host[1-{nodes}]",
            gpus=len(GPUS),
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "gres.conf").write_text(f"Name=gpu File={','.join(GPUS)}\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        cluster = Cluster(folder, hosts)
        cluster.start()
        yield cluster


def _is_installed(file):
    return os.path.exists(file) if os.path.isabs(file) else shutil.which(file) is not None
