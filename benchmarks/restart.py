"""Times a restart: from SIGKILL of a rank to the end of the first step that all ranks have taken.

    python benchmarks/restart.py [--backend torch|tensorflow|jax] [--rounds 5] [--hosts] [--quick]

Four ranks train the same model, with a backup after each step. The contenders take turns:
`keras-dist run --max-restarts` with processes that stand by and without, and with torch
`torchrun --max-restarts` with DDP on gloo, which reads its last checkpoint. With --hosts also two
hosts, network namespaces of this machine (needs root), without torchrun.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import conclude, load, options_of, parser, slug, surroundings, table
from host_jobs import INTERFACE, Unavailable, make_hosts

RANKS = 4
MORE = 3  # steps after the restart
LONGEST = 240  # seconds of a job
WAYS = {
    "standby": "keras-dist run --max-restarts",
    "imports": "the same with --standby 0",
    "torchrun": "torchrun --max-restarts, DDP",
}
BOUNDS = {"imports": 0.15, "torchrun": 0.5}


def main():
    made = parser(__doc__, quick="one round")
    made.add_argument("--backend", choices=["torch", "tensorflow", "jax"], default="torch")
    made.add_argument("--rounds", type=int, default=5, help="number of jobs of each contender")
    made.add_argument("--hosts", action="store_true", help="also on two test hosts")
    options = options_of(made, work)
    before, rounds = load(), 1 if options.quick else options.rounds
    ways = [way for way in WAYS if way != "torchrun" or options.backend == "torch"]
    found = {"one host": measure(options.backend, ways, rounds)}
    if options.hosts:
        try:
            with make_hosts(2) as (hosts, reach):
                ways = [way for way in ways if way != "torchrun"]
                where = "two hosts"
                found[where] = measure(options.backend, ways, rounds, hosts, reach)
        except Unavailable as error:
            made.error(f"no test hosts: {error}")
    report(options, before, found)


def measure(backend, ways, rounds, hosts=(), reach=None):
    """Returns the seconds of each job of each contender; `inf` for one that did not come back."""
    found = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(seconds(backend, way, hosts, reach))
            print(f"{backend}, {way}, {len(hosts) or 1} hosts: {found[way][-1]:.2f} s", flush=True)
    return found


def seconds(backend, way, hosts, reach):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({"way": way, "folder": name}))
        script = [__file__, "--worker", str(folder / "task.json")]
        command, variables = commands(way, folder, hosts, reach)
        own = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
        # In a session of its own, so that nothing of a job that hangs is left.
        with open(folder / "output", "w") as output:
            job = subprocess.Popen(
                [*command, *script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **variables},
                start_new_session=True,
            )
        try:
            job.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait()
        # A rank has written the end of its first step after the restart, the last of all counts.
        ends = [float(path.read_text()) for path in folder.glob("first-*")]
        if len(ends) < RANKS or job.returncode:
            print((folder / "output").read_text()[-2000:], file=sys.stderr)
            return float("inf")
        steps = {int(path.read_text()) for path in folder.glob("step-*")}
        last = int((folder / "killed-step").read_text())
        # The root may still have been writing its state of that step.
        if steps not in ({last}, {last + 1}):
            raise SystemExit(f"{way}: the job went on at {steps}, a rank was killed after {last}")
        return max(ends) - float((folder / "killed").read_text())


def commands(way, folder, hosts, reach):
    """Returns the command of a contender, and its variables."""
    if way == "torchrun":
        words = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
        # Without the variable, ranks of torch 2.13 read addresses of those before the restart, and
        # most restarts fail with "Connection refused".
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [sys.executable, "-m", "torch.distributed.run", *words], variables
    words = [sys.executable, "-m", "keras_dist.launch.cli", "run", "-np", str(RANKS)]
    words += ["--max-restarts", "2", "--standby", str(int(way == "standby"))]
    if not hosts:
        return [*words, sys.executable], {}
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").symlink_to(reach)
    words += ["--hosts", ",".join(f"{host.name}:{RANKS // len(hosts)}" for host in hosts)]
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent)])
    variables = {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "HYDRA_IFACE": INTERFACE}
    variables |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE, "FI_TCP_IFACE": INTERFACE}
    variables |= {"OMPI_MCA_btl_tcp_if_include": INTERFACE, "OMPI_MCA_btl": "tcp,self,sm"}
    variables |= {"PRTE_MCA_prte_if_include": INTERFACE}
    return [*hosts[0].enter, *words, sys.executable], variables


# --- on every rank ---------------------------------------------------------------------------


class Times:
    """Kills the last rank when all is ready, and records the first step after the restart."""

    def __init__(self, task, rank, restart):
        self.way, self.folder = task["way"], Path(task["folder"])
        self.rank, self.restart, self.after = rank, restart, 0
        self.begin = time.monotonic()

    def step(self, number):
        """Counts a step that has ended; returns whether the job is to end."""
        if self.restart:
            self.after += 1
            if self.after == 1:
                (self.folder / f"step-{self.rank}").write_text(str(number))
                (self.folder / f"first-{self.rank}").write_text(str(time.time()))
            return self.after == MORE
        time.sleep(0.02)
        if self.rank == RANKS - 1 and self.is_ready():
            (self.folder / "killed-step").write_text(str(number))
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def is_ready(self):
        """Returns whether the processes that stand by have imported all, or some time is over."""
        if self.way != "standby":
            return time.monotonic() - self.begin > 3
        if time.monotonic() - self.begin < 1:
            return False
        self.begin = time.monotonic()
        wanted, idle = str(self.folder / "task.json").encode(), 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                if b"launch.standby_process" in words and wanted in words:
                    idle += (path / "wchan").read_text().startswith(("futex", "do_futex")) and (
                        int((path / "statm").read_text().split()[1]) > 20000  # pages
                    )
            except OSError:
                pass
        return idle == RANKS


def work(path):
    task = json.loads(Path(path).read_text())
    (work_torchrun if task["way"] == "torchrun" else work_keras)(task)


def work_keras(task):
    import keras
    import numpy as np

    import keras_dist

    keras_dist.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(32 * RANKS * 1000, 64)).astype(np.float32)
    y = np.arange(len(x)) % 10
    layers = [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), loss)
    times = Times(task, keras_dist.rank(), int(os.environ["KERAS_DIST_RESTART"]))

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = times.step(int(self.model.optimizer.iterations))

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    backup = keras_dist.callbacks.BackupAndRestore(f"{task['folder']}/backup", save_freq=1)
    callbacks = keras_dist.callbacks(backup, Steps())
    data = keras_dist.data.shard((x, y), batch_size=32)
    model.fit(data, epochs=1000, verbose=0, callbacks=callbacks)


def work_torchrun(task):
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    rank, checkpoint = distributed.get_rank(), Path(task["folder"]) / "checkpoint"
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    plain = torch.nn.Sequential(*layers)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    adam = torch.optim.Adam(model.parameters())
    loss = torch.nn.CrossEntropyLoss()
    x, y = torch.randn(32 * 1000, 64), torch.arange(32 * 1000) % 10
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        plain.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        first = state["step"]
    times = Times(task, rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    for step in range(first, 100_000):
        at = slice(step % 1000 * 32, step % 1000 * 32 + 32)
        adam.zero_grad()
        loss(model(x[at]), y[at]).backward()
        adam.step()
        if rank == 0:
            state = {"model": plain.state_dict(), "adam": adam.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
        distributed.barrier()
        if times.step(step + 1):
            break
    distributed.destroy_process_group()


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# A restart, {options.backend}", surroundings(before)]
    head = ["seconds from SIGKILL to the first step of all", "median", "least", "most", "jobs"]
    body, rows = [], []
    for where, of_ways in found.items():
        medians = {way: statistics.median(times) for way, times in of_ways.items()}
        for way, times in of_ways.items():
            numbers = [f"{each:.2f}" for each in (medians[way], min(times), max(times))]
            body.append([f"{where}, {WAYS[way]}", *numbers, str(len(times))])
        for way, bound in BOUNDS.items():
            if way in medians:
                value = medians["standby"] / medians[way]
                what = f"{options.backend}, {where}, against {WAYS[way]}"
                rows.append((what, f"<= {bound} x", f"{value:.3f} x", value <= bound))
    text.append(table(head, body))
    conclude(options.output, slug(f"restart_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
