"""Training that is interrupted again and again ends like training that is not: a state machine.

Hypothesis draws a way to train, and what happens: training goes on for some steps, one process or
all lose what they have in memory, a file is damaged or removed, the job starts again with another
number of ranks and another global batch. After each step the state equals that of an uninterrupted
run to the bit.

    INTERRUPTIONS=10         ten times as many examples
    INTERRUPTIONS_SEED=7     others
"""

import dataclasses
import os
import shutil
import time

import keras
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from interrupted import BATCH, SAMPLES, new_model, run, seed_generators, ways, written
from mpi4py import MPI

import keras_dist
from keras_dist import config
from keras_dist.resume import format

pytestmark = pytest.mark.jobs("hooks", "jax-2", "torch-3")

# Each job draws others: the two of torch have more of them together than one would run.
SEED = f"{os.environ.get('INTERRUPTIONS_SEED', '0')} in {os.environ.get('TEST_JOB', 'no job')}"
COUNT = {"tensorflow": 4, "jax": 4, "torch": 6}[keras.backend.backend()]
EXAMPLES = COUNT * int(os.environ.get("INTERRUPTIONS", "1"))
RULES = 4  # in an example

world = MPI.COMM_WORLD.Dup()
uninterrupted = {}  # runs by way


class Life(RuleBasedStateMachine):
    """A training, with what its files must hold."""

    exact = False

    def __init__(self):
        super().__init__()
        self.way, self.model, self.failed, self.ended = None, None, False, False
        self.ranks, self.batch, self.sharded = world.size, BATCH, False
        self.attempt = 1

    # --- What happens

    def begin(self, way, folder):
        """Begins to train, after an uninterrupted run of the same way."""
        self.way, self.folder = way, folder
        on_root(lambda: shutil.rmtree(folder, ignore_errors=True))
        self.together(self.compare_with)

    @rule(
        batches=st.integers(1, 4),
        how=st.sampled_from(["after it", "before the write", "at the next epoch"]),
        lost=st.sampled_from([[], [world.size - 1], [0], [*range(world.size)]]),
        sharded=st.booleans(),
    )
    def train(self, batches, how, lost, sharded):
        """Trains until an interruption; then the processes of some ranks end.

        New ones take their place, with or without sharded state if all have ended.
        """
        self.go_on(batches, how)
        if world.rank in lost:
            self.model = None
        if len(lost) == world.size:
            self.sharded = sharded
        if lost:
            self.rejoin()

    @precondition(lambda self: self.exact)
    @rule(ranks=st.integers(1, world.size), batch=st.sampled_from([BATCH, BATCH // 2]))
    def change_ranks(self, ranks, batch):
        """The job starts again with other ranks, and with another global batch.

        The end of a step of the new batch must not be within one that was trained on.
        """
        self.model, self.ranks = None, ranks
        if self.position() % batch == 0 and not self.way.momentum:
            self.batch = batch
        self.rejoin()

    def rejoin(self):
        """Makes a new communicator, as for new processes; ranks that are left out are alone."""
        keras_dist.shutdown()
        together = world.rank < self.ranks
        keras_dist.init([*range(self.ranks)] if together else [world.rank])

    @precondition(lambda self: len({path.name for _, path in self.files()}) > 1)
    @rule()
    def damage(self):
        """The newest generation is damaged: the one before is used."""
        path = self.files()[0][1]
        for copy in [path, *self.folder.glob(f"*/{path.name}")]:
            on_root(lambda copy=copy: cut(format.read(copy).parts[-1]))

    @precondition(lambda self: self.way.callback == "memory" and self.files())
    @rule()
    def lose_the_disk(self):
        """The directory is lost, but not what is in memory."""
        on_root(lambda: shutil.rmtree(self.folder / "files", ignore_errors=True))

    def teardown(self):
        """Trains to the end."""
        try:
            if self.way and not self.failed and not self.ended:
                self.go_on(None, "")
        finally:
            if self.ranks != world.size:
                keras_dist.shutdown()
                keras_dist.init()

    # --- What must be true

    def compare_with(self):
        """Trains without an interruption, once for each way."""
        key = dataclasses.replace(self.way, callback="", save_freq="")
        if key not in uninterrupted:
            folder = self.folder.with_name("uninterrupted")
            if world.rank == 0:
                folder.mkdir(exist_ok=True)
            keras_dist.barrier()
            batch = BATCH // 2 if self.exact and not self.way.momentum else BATCH
            model = new_model(self.way, 1)
            seed_generators(1)
            uninterrupted[key] = run(self.way, folder, model, batch, resumes=False)
        self.expected = uninterrupted[key]

    def go_on(self, batches, how):
        """Trains on from what is written, and compares."""
        if self.ended:
            return
        files, begin = self.files(), self.position()
        self.attempt += 1
        if not files:
            self.model = None  # the script begins anew, in new processes
        found = self.together(lambda: self.run_once(bool(files), batches, how))
        self.ended = any(everywhere(found is not None and found.end is not None))
        now = self.position()
        self.together(lambda: self.compare(found, begin, now, how) if found else None)

    def compare(self, found, begin, now, how):
        if found.begin is not None:
            assert found.begin == begin, "not where the newest file is"
        for at, state in found.states.items():
            assert state == self.expected.states[at], f"another state after {at} samples"
        if found.end is not None:
            self.compare_ends(found.end, self.expected.end)
        elif found.last is not None:
            self.check_loss_of_steps(found.last, begin, now, how)

    def run_once(self, resumes, batches, how):
        if world.rank >= self.ranks:
            return None
        if self.model is None:
            self.model = new_model(self.way, self.attempt if resumes else 1, self.sharded)
        seed_generators(10 * self.attempt if resumes else 1)
        if world.rank == 0:
            self.folder.mkdir(exist_ok=True)
        keras_dist.barrier()
        return run(self.way, self.folder, self.model, self.batch, batches, how)

    def compare_ends(self, found, expected):
        if self.exact:
            if self.way.momentum:  # the losses are those of the same global batches
                for name, values in expected[3].items():
                    assert found[3][name] == pytest.approx(values, rel=1e-5), name
            # The sums that are logged depend on the order of ranks.
            found, expected = found[:3], expected[:3]
        for mine, other in zip(found, expected, strict=True):
            assert repr(mine) == repr(other)

    def check_loss_of_steps(self, last, begin, now, how):
        """Checks that enough was written: no more steps are lost than `save_freq` says."""
        every = self.way.save_freq
        if every == "epoch":
            least = last - last % SAMPLES if how == "at the next epoch" else last - SAMPLES
        else:
            least = last - (every - (how != "before the write")) * self.batch
        assert now >= max(begin, least), "too little was written"

    def files(self):
        return on_root(lambda: written(self.way, self.folder) if self.folder.exists() else [])

    def position(self):
        """Returns the position from which training goes on."""
        files = self.files()
        return files[0][0] if files else 0

    def together(self, work):
        """Calls a function on all ranks; raises on all, if it raises on one."""
        found, failure = None, ""
        try:
            found = work()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = [text for text in everywhere(failure) if text]
        self.failed = bool(failures)
        assert not failures, failures[0]
        return found


class RandomLife(Life):
    """Each rank has random numbers; callbacks have states. The number of ranks stays."""

    @initialize(way=ways(exact=False))
    def start(self, way):
        self.begin(way, FOLDER[0] / "files")


class ExactLife(Life):
    """All sums are exact, so the number of ranks may change."""

    exact = True

    @initialize(way=ways(exact=True))
    def start(self, way):
        self.begin(way, FOLDER[0] / "files")


FOLDER = []  # of the test that runs


def cut(path):
    """Cuts off the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])


def everywhere(value):
    """Returns the values of all ranks. A blocking call would use the cores of those that work."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(0.001)
    return world.allgather(value)


def on_root(work):
    """Calls a function on the first rank, between all others; returns what it returns."""
    everywhere(None)
    return world.bcast(work() if world.rank == 0 else None)


@pytest.fixture
def place(shared_tmp_path, monkeypatch):
    """Sets the directory of all files, also of those in memory."""
    changed = {"job_id": "one", "memory_directory": str(shared_tmp_path / "files" / "memory")}
    found = dataclasses.replace(config.settings(), **changed)
    monkeypatch.setattr(config, "settings", lambda: found)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine does not fail here
    FOLDER[:] = [shared_tmp_path]
    uninterrupted.clear()


LIVES = {"the same ranks": RandomLife, "other numbers of ranks": ExactLife}


@pytest.mark.long
@pytest.mark.limit(600)
@pytest.mark.parity("training interrupted again and again equals uninterrupted training: {ranks}")
@pytest.mark.parametrize("ranks", LIVES)
def test_interrupted_training_ends_like_uninterrupted_training(ranks, place):
    options = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
    options |= {"max_examples": EXAMPLES, "stateful_step_count": RULES}
    try:
        run_machine(seed(SEED)(LIVES[ranks]), settings=settings(**options))
    except AssertionError as error:
        error.add_note(f"with INTERRUPTIONS_SEED={SEED}")
        raise
