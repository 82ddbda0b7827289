"""examples/jobs: scripts for batch systems, tested without a batch system."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from keras_dist.launch.cli.hosts import read_hostfile
from keras_dist.launch.cli.options import add_options

pytestmark = pytest.mark.short

JOBS = Path(__file__).parents[3] / "examples" / "jobs"
SCRIPTS = sorted(JOBS.glob("*.sh"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_understands_it(script):
    assert len(SCRIPTS) == 5
    checks = [["bash", "-n", script], [SHELLCHECK, "--exclude=SC1091", script]]
    for command in checks:  # SC1091: the environment that it activates does not exist here
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


# Output of the batch system's commands and of the job; `code` is the job's exit code.
SAYS = '#!/bin/sh\necho "$(basename "$0") $*"\n'
JOB = "srun mpiexec keras-dist".split()


@pytest.fixture
def submit(tmp_path):
    """A function that runs a script with stand-ins for all commands that it calls."""

    def run(name, code=0, **environment):
        stands_in = tmp_path / "bin"
        stands_in.mkdir()
        for command in [*JOB, "module", "scontrol"]:
            ends = f"exit {code}\n" if command in JOB else ""
            (stands_in / command).write_text(SAYS + ends)
            (stands_in / command).chmod(0o755)
        activate = tmp_path / "keras_dist" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.touch()
        ended = subprocess.run(
            ["bash", JOBS / name],
            env={"PATH": f"{stands_in}:/usr/bin:/bin", "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )
        assert not ended.stderr
        assert ended.returncode == code
        return ended.stdout.splitlines()[1:]  # after module

    return run


SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}


@pytest.mark.parametrize("code", [0, 1, 75])
def test_srun_is_queued_again_when_its_time_was_over(submit, code):
    said = submit("slurm_srun.sh", code, **SLURM)
    again = ["scontrol requeue 7"] if code == 75 else []
    assert said == ["srun --mpi=pmix --kill-on-bad-exit=1 python train.py", *again]


def test_polaris_starts_four_ranks_on_each_node(submit, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn2\nn2\n")
    said = submit("pbs_polaris.sh", PBS_NODEFILE=str(nodes), PBS_O_WORKDIR=str(tmp_path))
    assert said == ["mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth python train.py"]


@pytest.mark.parametrize(
    ("name", "job"),
    [("slurm_mpirun.sh", "SLURM_JOB_ID"), ("pbs_openmpi.sh", "PBS_JOBID"), ("lsf.sh", "LSB_JOBID")],
)
def test_keras_dist_run_gets_words_that_it_knows(submit, tmp_path, name, job):
    said = submit(name, 3, **{job: "7", "PBS_O_WORKDIR": str(tmp_path)})
    options = parsed(shlex.split(said[0]))
    assert (options.log_dir, options.program) == ("logs/7", ["python", "train.py"])


def parsed(words):
    """Returns the options of a command line of `keras-dist run`."""
    assert words[:2] == ["keras-dist", "run"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args(words[2:])


# --- Kubernetes


def fields(required=(), **properties):
    """Returns the schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
REPLICAS = fields(
    ("template",),
    replicas=NUMBER,
    restartPolicy={"enum": ["Never", "OnFailure"]},
    template={"type": "object"},
)
MPI_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=fields(("name",), name=TEXT),
    spec=fields(
        ("mpiReplicaSpecs",),
        slotsPerWorker=NUMBER,
        runLauncherAsWorker={"type": "boolean"},
        sshAuthMountPath=TEXT,
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runPolicy=fields(
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            ttlSecondsAfterFinished=NUMBER,
            activeDeadlineSeconds=NUMBER,
            backoffLimit=NUMBER,
            suspend={"type": "boolean"},
        ),
        mpiReplicaSpecs=fields(("Launcher", "Worker"), Launcher=REPLICAS, Worker=REPLICAS),
    ),
)


def test_the_job_of_the_mpi_operator_has_fields_that_there_are(tmp_path):
    job = yaml.safe_load((JOBS / "mpijob.yaml").read_text())
    jsonschema.validate(job, MPI_JOB)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "slotsPerWorkers": 2}}, MPI_JOB)
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a package of the tests")
    replicas = job["spec"]["mpiReplicaSpecs"]
    for each in replicas.values():  # a field that there is not gets lost
        pod = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(each["template"])
        assert pod.to_dict() == each["template"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert parsed(launcher["command"]).hostfile == "/etc/mpi/hostfile"
    slots = job["spec"]["slotsPerWorker"]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == slots
    hosts = [f"keras-dist-worker-{n}.keras-dist.default.svc" for n in range(2)]
    (tmp_path / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    assert read_hostfile(str(tmp_path / "hostfile")) == dict.fromkeys(hosts, slots)


def test_what_recipes_and_readme_name_is_there():
    readme = (JOBS / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w.]+)\)", readme))
    assert linked == {path.name for path in JOBS.iterdir()} - {"README.md"}
    extras = (JOBS.parents[1] / "setup.cfg").read_text()
    for name in ("Dockerfile", "keras_dist.def"):
        text = (JOBS / name).read_text()
        (wanted,) = re.findall(r"/opt/keras_dist\[([\w,-]+)\]", text)
        assert all(f"\n{extra} =\n" in extras for extra in wanted.split(","))
