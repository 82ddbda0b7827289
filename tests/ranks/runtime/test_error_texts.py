"""The text of each error that bad input raises at the public faces: tests/golden/errors.txt.

All ranks make the same mistake, unless the title says otherwise. Paths, addresses and the number of
this rank are replaced. The texts do not depend on the backend.
"""

import functools
import re

import golden
import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist import callbacks, checkpoints, config, data, elastic, errors, metrics

pytestmark = [
    pytest.mark.jobs("tensorflow-2", "jax-2", "torch-2"),
    pytest.mark.skipif(kd.size() != 2, reason="the texts name two ranks"),
]

RANK, ONES = kd.rank(), np.ones(4, "float32")
SGD, Dense = keras.optimizers.SGD, keras.layers.Dense
wrap, partial = kd.DistributedOptimizer, kd.PartialDistributedOptimizer
X = np.ones((8, 3), "float32")


def model_of(optimizer=None, units=1, built=True):
    """Returns a compiled model whose names do not depend on the tests before."""
    layers = [keras.Input((3,))] * built + [Dense(units, name="dense")]
    model = keras.Sequential(layers, name="model")
    eagerly = keras.backend.backend() == "tensorflow"  # tracing takes longest
    model.compile(wrap(SGD(0.1)) if optimizer is None else optimizer, "mse", run_eagerly=eagerly)
    return model


def fit(*others, optimizer=None, x=X, **options):
    """Trains on data that is the same on all ranks."""
    options = {"batch_size": 4, "verbose": 0, **options}
    list_of = kd.callbacks(*others, **options.pop("made", {}))
    if isinstance(x, np.ndarray):
        options["y"] = x[:, :1]
    model_of(optimizer).fit(x, callbacks=list_of, **options)


def in_set(call):
    """Calls with a process set of rank 0."""
    process_set = kd.add_process_set([0])
    try:
        return call(process_set)
    finally:
        kd.remove_process_set(process_set)


def files(tmp):
    """Returns the folder of the files that are read, after it is made."""
    if not (tmp / "plain.txt").exists() and RANK == 0:
        np.save(tmp / "ones.npy", X)
        np.savez(tmp / "two.npz", x=X, y=X[:4])
        (tmp / "damaged.keras").write_bytes(b"nothing")
        (tmp / "empty").mkdir()
        (tmp / "plain.txt").write_text("nothing")
    kd.barrier()
    return tmp


def a_metric():
    return keras.metrics.Mean("mean")


def with_variable(name, value):
    """Parses an environment variable."""
    return config.parse({name: value})


OPERATIONS = {
    "allreduce: op": lambda: kd.allreduce(ONES, op="mean"),
    "allreduce: op and average": lambda: kd.allreduce(ONES, op="sum", average=True),
    "allreduce: dtype": lambda: kd.allreduce(np.array(["text"])),
    "allreduce: a function": lambda: kd.allreduce(print),
    "allreduce: integers on average": lambda: kd.allreduce(np.ones(2, bool), op="average"),
    "allreduce: prescale_factor": lambda: kd.allreduce(ONES, prescale_factor="2"),
    "allreduce: factor that is infinite": lambda: kd.allreduce(ONES, postscale_factor=float("inf")),
    "allreduce: compression": lambda: kd.allreduce(ONES, compression="gzip"),
    "allreduce: process_set": lambda: kd.allreduce(ONES, process_set=[0, 1]),
    "allreduce: process set that is not added": lambda: kd.allreduce(
        ONES, process_set=kd.ProcessSet([0])
    ),
    "allreduce: out": lambda: kd.allreduce(ONES, out=np.ones(3, "float32")),
    "allreduce: out that is no array": lambda: kd.allreduce(ONES, out=[1.0]),
    "allreduce: shapes that differ": lambda: kd.allreduce(np.ones(3 + RANK), name="x"),
    "allreduce: dtypes that differ": lambda: kd.allreduce(np.ones(3, ["float32", "float64"][RANK])),
    "allreduce: ops that differ": lambda: kd.allreduce(ONES, op=["sum", "max"][RANK]),
    "allreduce: value of one rank": lambda: kd.allreduce([ONES, print][RANK]),
    "allreduce and barrier": lambda: [lambda: kd.allreduce(ONES), kd.barrier][RANK](),
    "allreduce: names that differ": lambda: kd.allreduce(ONES, name=["a", "b"][RANK]),
    "allreduce: factors that differ": lambda: kd.allreduce(ONES, prescale_factor=1 + RANK),
    "allreduce: a factor of truth values": lambda: kd.allreduce([True], "max", prescale_factor=2),
    "allreduce: objects": lambda: kd.allreduce(np.array([None])),
    "allreduce: adasum of integers": lambda: kd.allreduce(1, "adasum"),
    "allreduce: adasum and sum": lambda: kd.allreduce(ONES, ["adasum", "sum"][RANK]),
    "grouped_allreduce: numbers that differ": lambda: kd.grouped_allreduce([ONES] * (1 + RANK)),
    "grouped_allreduce: factors that differ": lambda: kd.grouped_allreduce(
        [ONES], postscale_factor=3 - RANK
    ),
    "sparse_allreduce: op": lambda: kd.sparse_allreduce(X[:1], [0], op="max"),
    "sparse_allreduce: too few indices": lambda: kd.sparse_allreduce(X[:2], [1]),
    "sparse_allreduce: indices of two dimensions": lambda: kd.sparse_allreduce(X[:2], [[1], [2]]),
    "sparse_allreduce: indices that are no integers": lambda: kd.sparse_allreduce(
        X[:2], [1.0, 2.0]
    ),
    "sparse_allreduce: a scalar": lambda: kd.sparse_allreduce(np.float64(1), np.zeros((), int)),
    "sparse_allreduce: truth values": lambda: kd.sparse_allreduce(X[:1] > 0, [0], "sum"),
    "sparse_allreduce: indices of one rank": lambda: kd.sparse_allreduce(
        X[:2], [1, 2, 3][: 2 + RANK]
    ),
    "sparse_allreduce: rows that differ": lambda: kd.sparse_allreduce(X[:1, : 3 - RANK], [0]),
    "sparse_allreduce: dtypes of indices that differ": lambda: kd.sparse_allreduce(
        X[:1], np.array([0], ["int64", "int32"][RANK])
    ),
    "sparse_allreduce: ops that differ": lambda: kd.sparse_allreduce(
        X[:1], [0], ["sum", "average"][RANK]
    ),
    "allgather: a scalar": lambda: kd.allgather(1.0),
    "allgather: objects": lambda: kd.allgather([None]),
    "allgather: later dimensions that differ": lambda: kd.allgather(np.ones((1, 1 + RANK))),
    "grouped_allgather: a scalar": lambda: kd.grouped_allgather([[1], 1]),
    "grouped_allgather: later dimensions that differ": lambda: kd.grouped_allgather(
        [[1.0], np.ones((1, 1 + RANK))], "x"
    ),
    "alltoall: a scalar": lambda: kd.alltoall(1.0),
    "alltoall: objects": lambda: kd.alltoall(np.array([None, None])),
    "alltoall: splits below 0": lambda: kd.alltoall(ONES, splits=[-1, 5]),
    "alltoall: one split": lambda: kd.alltoall(ONES, splits=[4]),
    "alltoall: more than there is": lambda: kd.alltoall(ONES, splits=[5, 0]),
    "alltoall: splits that are no integers": lambda: kd.alltoall(ONES, splits=[1.0, 1.0]),
    "alltoall: splits of two dimensions": lambda: kd.alltoall(ONES, splits=[[1, 1]]),
    "alltoall: splits of one rank": lambda: kd.alltoall(ONES, splits=[[0, 0], [9, 0]][RANK]),
    "alltoall: rows": lambda: kd.alltoall(ONES[:3]),
    "alltoall: later dimensions that differ": lambda: kd.alltoall(np.ones((2, 1 + RANK)), name="x"),
    "alltoall and reducescatter": lambda: [kd.alltoall, kd.reducescatter][RANK](ONES),
    "broadcast: root_rank": lambda: kd.broadcast(ONES, 2),
    "broadcast: root_rank that is no number": lambda: kd.broadcast(ONES, "0"),
    "broadcast: root ranks that differ": lambda: kd.broadcast(ONES, RANK),
    "broadcast: objects": lambda: kd.broadcast([None]),
    "broadcast_: a tuple": lambda: kd.broadcast_((1, 2)),
    "broadcast_: read only": lambda: kd.broadcast_(np.broadcast_to(ONES, (2, 4))),
    "broadcast_: objects": lambda: kd.broadcast_([np.array([None])]),
    "broadcast_: root_rank": lambda: kd.broadcast_([], 2),
    "broadcast_: byte orders that differ": lambda: kd.broadcast_(
        [np.ones(3, ["<f4", ">f4"][RANK])]
    ),
    "broadcast_: shapes that differ": lambda: kd.broadcast_([np.ones(3 + RANK)], 0, "w"),
    "broadcast_: root ranks that differ": lambda: kd.broadcast_([np.ones(3)], RANK),
    "broadcast_object: root_rank": lambda: kd.broadcast_object(1, -1),
    "broadcast_object: what cannot be pickled": lambda: kd.broadcast_object(lambda: 1),
    "reducescatter: a scalar": lambda: kd.reducescatter(1.0),
    "reducescatter: op": lambda: kd.reducescatter(ONES, "adasum"),
    "reducescatter: truth values": lambda: kd.reducescatter([True, False]),
    "reducescatter: shapes that differ": lambda: kd.reducescatter(np.ones(3 + RANK)),
    "reducescatter: a scalar of one rank": lambda: kd.reducescatter([ONES, 1.0][RANK]),
    "reducescatter: ops that differ": lambda: kd.reducescatter(ONES, ["sum", "average"][RANK]),
    "reducescatter: factors that differ": lambda: kd.reducescatter(ONES, prescale_factor=1 + RANK),
    "grouped_reducescatter: numbers that differ": lambda: kd.grouped_reducescatter(
        [ONES] * (1 + RANK)
    ),
    "send: to itself": lambda: kd.send(ONES, RANK),
    "send: destination": lambda: kd.send(ONES, 7),
    "recv: source": lambda: kd.recv(-1),
    "synchronize": lambda: kd.synchronize(3),
    "poll": lambda: kd.poll(None),
    "raise_on_all": lambda: raise_on_one(),
    "ProcessSet": lambda: kd.ProcessSet("01"),
    "ProcessSet: a float": lambda: kd.ProcessSet([0.5]),
    "ProcessSet: no ranks": lambda: kd.ProcessSet([]),
    "ProcessSet: a rank twice": lambda: kd.ProcessSet([0, 0]),
    "ProcessSet: below 0": lambda: kd.ProcessSet([-1]),
    "ProcessSet: a number": lambda: kd.ProcessSet(3),
    "add_process_set: a rank": lambda: kd.add_process_set([5]),
    "add_process_set: all ranks": lambda: kd.add_process_set([0, 1]),
    "add_process_set: the set of all": lambda: kd.add_process_set(kd.global_process_set),
    "add_process_set: a float of one rank": lambda: kd.add_process_set([[0], [0.5]][RANK]),
    "add_process_set and barrier": lambda: [
        lambda: kd.add_process_set([0]),
        kd.barrier,
    ][RANK](),
    "add_process_set: the same ranks": lambda: in_set(lambda _: kd.add_process_set([0])),
    "add_process_set: sets that differ": lambda: kd.add_process_set([RANK]),
    "remove_process_set": lambda: kd.remove_process_set([0]),
    "a collective outside of its set": lambda: in_set(
        lambda one: kd.allreduce(ONES, process_set=one)
    ),
    "broadcast: a root outside of its set": lambda: in_set(
        lambda one: kd.broadcast(ONES, 1, process_set=one)
    ),
    "init: process_sets": lambda: kd.init(process_sets=[0]),
}


ONE = keras.Variable(np.zeros(1), name="one")


def built(optimizer):
    optimizer.build([ONE])
    return optimizer


def raise_on_one():
    with kd.raise_on_all():
        if RANK == 1:
            raise KeyError("x")


OPTIMIZERS = {
    "DistributedOptimizer: a name": lambda: wrap("sgd"),
    "DistributedOptimizer: twice": lambda: wrap(wrap(SGD())),
    "DistributedOptimizer: twice, in a loss scale": lambda: wrap(
        keras.optimizers.LossScaleOptimizer(wrap(SGD()))
    ),
    "DistributedOptimizer: op": lambda: wrap(SGD(), op="max"),
    "DistributedOptimizer: accumulation twice": lambda: wrap(
        SGD(gradient_accumulation_steps=4), backward_passes_per_step=2
    ),
    "DistributedOptimizer: passes of one that is built": lambda: wrap(
        built(SGD()), backward_passes_per_step=2
    ),
    "DistributedOptimizer: a variable in two groups": lambda: wrap(SGD(), groups=[[ONE], [ONE]]),
    "DistributedOptimizer: compression": lambda: wrap(SGD(), compression=3),
    "DistributedOptimizer: backward_passes_per_step": lambda: wrap(
        SGD(), backward_passes_per_step=0
    ),
    "DistributedOptimizer: a fraction of passes": lambda: wrap(SGD(), backward_passes_per_step=1.5),
    "DistributedOptimizer: gradient_predivide_factor": lambda: wrap(
        SGD(), gradient_predivide_factor=0
    ),
    "DistributedOptimizer: predivided sum": lambda: wrap(
        SGD(), op="sum", gradient_predivide_factor=2.0
    ),
    "DistributedOptimizer: groups": lambda: wrap(SGD(), groups="all"),
    "DistributedOptimizer: groups below 0": lambda: wrap(SGD(), groups=-1),
    "DistributedOptimizer: average of Adasum": lambda: wrap(
        SGD(), op="adasum", backward_passes_per_step=2, average_aggregated_gradients=True
    ),
    "DistributedOptimizer: process_set": lambda: wrap(SGD(), process_set=0),
    "DistributedOptimizer: a sharded Lamb": lambda: wrap(keras.optimizers.Lamb(), shard_state=True),
    "PartialDistributedOptimizer: local_layers": lambda: partial(SGD(), local_layers=["dense"]),
    "PartialDistributedOptimizer: clipping by a norm of all": lambda: partial(
        SGD(global_clipnorm=1.0), local_layers=[Dense(1, name="dense")]
    ),
    "register_local_var": lambda: wrap(SGD()).register_local_var(3),
    "apply: gradients": lambda: wrap(SGD()).apply([ONES], []),
    "LARS: trust_coefficient": lambda: kd.optimizers.LARS(trust_coefficient=-1),
    "LARS: momentum": lambda: kd.optimizers.LARS(momentum=2),
    "metrics.merge: a metric": lambda: metrics.merge("accuracy", "sum"),
    "metrics.merge: how": lambda: metrics.merge(a_metric(), "median"),
    "adapt: a layer": lambda: kd.adapt(Dense(1, name="dense"), X),
    "verify_replicas": lambda: verify_different(),
}


def verify_different():
    model = model_of()
    model.set_weights([np.full((3, 1), RANK), np.zeros(1)])
    kd.verify_replicas(model)


class ListOf(keras.utils.PyDataset):
    """Data of one batch, or of as many as are given for each rank."""

    def __init__(self, *lengths):
        super().__init__()
        self.lengths = lengths

    def __len__(self):
        return self.lengths[RANK]

    def __getitem__(self, index):
        return X[:2] + RANK, X[:2, :1]


class Refuses(keras.callbacks.Callback):
    """Has a state that no backup can hold."""

    def state_dict(self):
        return {"set": {1}}

    def load_state_dict(self, state):
        pass


class Fails(keras.callbacks.Callback):
    """Fails at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("loss")


class OnOne(keras.callbacks.Callback):
    """Changes the replica of rank 1."""

    def on_epoch_begin(self, epoch, logs=None):
        if RANK == 1:
            self.model.layers[0].bias.assign([7.0])


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


CALLBACKS = {
    "callbacks: a list": lambda: kd.callbacks(["x"]),
    "callbacks: uneven": lambda: kd.callbacks(uneven="ignore"),
    "callbacks: on_failure": lambda: kd.callbacks(on_failure="retry"),
    "callbacks: on_failure replace": lambda: kd.callbacks(on_failure="replace"),
    "callbacks: AdmitRanks": lambda: kd.callbacks.AdmitRanks(),
    "callbacks: warmup without initial_lr": lambda: kd.callbacks(warmup_epochs=3),
    "callbacks: root_rank": lambda: kd.callbacks(root_rank=2),
    "BroadcastGlobalVariablesCallback: root_rank": lambda: (
        callbacks.BroadcastGlobalVariablesCallback("x")
    ),
    "BroadcastGlobalVariablesCallback: local_variables": lambda: fit(
        callbacks.BroadcastGlobalVariablesCallback(local_variables=[3])
    ),
    "UnevenDataCallback: uneven": lambda: callbacks.UnevenDataCallback("drop"),
    "GoOnWithoutLostRanks: share_out": lambda: callbacks.GoOnWithoutLostRanks(share_out=3),
    "VerifyReplicas: every": lambda: callbacks.VerifyReplicas(every=0),
    "RootOnly: no callback": lambda: callbacks.RootOnly("log"),
    "RootOnly: root_rank": lambda: callbacks.RootOnly(keras.callbacks.Callback(), root_rank=99),
    "RootOnly: a callback that changes training": lambda: callbacks.RootOnly(
        keras.callbacks.ReduceLROnPlateau()
    ),
    "LearningRateWarmupCallback: none": lambda: callbacks.LearningRateWarmupCallback(None),
    "LearningRateWarmupCallback: a schedule": lambda: fit(
        callbacks.LearningRateWarmupCallback(0.1), optimizer=wrap(SGD(schedule()))
    ),
    "LearningRateWarmupCallback: unknown steps": lambda: fit(
        callbacks.LearningRateWarmupCallback(0.1), x=((X, X[:, :1]) for _ in range(3))
    ),
    "ShardedCheckpoint: keep": lambda: callbacks.ShardedCheckpoint("checkpoints", keep=0),
    "ShardedCheckpoint: root_rank": lambda: callbacks.ShardedCheckpoint("x", root_rank=9),
    "ModelCheckpoint: root_rank": lambda: callbacks.ModelCheckpoint("m.keras", root_rank=99),
    "BackupAndRestore: root_rank": lambda: callbacks.BackupAndRestore("backup", root_rank=-1),
    "fit: a plain optimizer": lambda: fit(optimizer=SGD(0.1)),
    "fit: steps that differ": lambda: fit(x=ListOf(2, 3), made={"uneven": "error"}),
    "fit: arguments that differ": lambda: fit(epochs=1 + RANK),
    "fit: a callback of the root fails": lambda: fit(callbacks.RootOnly(Fails())),
    "fit: replicas that differ": lambda: fit(OnOne(), callbacks.VerifyReplicas()),
    "fit: models that differ": lambda: model_of(units=1 + RANK).fit(
        X, X[:, :1], verbose=0, callbacks=kd.callbacks()
    ),
}

FILES = {
    "BackupAndRestore: a file": lambda tmp: fit(callbacks.BackupAndRestore(tmp / "plain.txt")),
    "BackupAndRestore: a state": lambda tmp: fit(
        callbacks.BackupAndRestore(tmp / "refused"), Refuses()
    ),
    "BackupAndRestore: of another model": lambda tmp: (
        fit(callbacks.BackupAndRestore(tmp / "b", delete_checkpoint=False)),
        fit(callbacks.BackupAndRestore(tmp / "b"), optimizer=wrap(keras.optimizers.Adam())),
    ),
    "BackupAndRestore: damaged": lambda tmp: fit(callbacks.BackupAndRestore(damaged(tmp / "b"))),
    "ShardedCheckpoint: a file": lambda tmp: fit(callbacks.ShardedCheckpoint(tmp / "plain.txt")),
    "ShardedCheckpoint: damaged": lambda tmp: (
        fit(callbacks.ShardedCheckpoint(tmp / "c")),
        fit(callbacks.ShardedCheckpoint(damaged(tmp / "c"))),
    ),
    "checkpoints.load: nothing": lambda tmp: checkpoints.load(model_of(), tmp / "empty"),
    "checkpoints.load: root_rank": lambda tmp: checkpoints.load(model_of(), tmp, root_rank=3),
    "checkpoints.export: nothing": lambda tmp: checkpoints.export(tmp / "empty", tmp / "m.keras"),
    "checkpoints.export: a suffix": lambda tmp: checkpoints.export(tmp / "empty", tmp / "m.txt"),
    "ModelCheckpoint: a directory that is a file": lambda tmp: fit(
        callbacks.ModelCheckpoint(tmp / "plain.txt" / "m.keras")
    ),
    "load_model: damaged": lambda tmp: kd.load_model(tmp / "damaged.keras"),
    "load_model: custom_optimizers": lambda tmp: kd.load_model(
        tmp / "damaged.keras", custom_optimizers=["sgd"]
    ),
    "ObjectState: a value": lambda tmp: elastic.ObjectState(directory=tmp / "s", x={1}).commit(),
    "data.npy: nothing": lambda tmp: data.npy(tmp / "none.npy", batch_size=2),
    "data.npz: a name": lambda tmp: data.npz(tmp / "two.npz", x="z", batch_size=2),
    "data.npz: lengths": lambda tmp: data.npz(tmp / "two.npz", x="x", y="y", batch_size=2),
    "data.image_dataset: no images": lambda tmp: data.image_dataset(tmp / "empty", batch_size=2),
    "data.tar: nothing": lambda tmp: data.tar(str(tmp / "*.tar"), print, batch_size=2),
    "data.tfrecord: nothing": lambda tmp: data.tfrecord(
        str(tmp / "*.tfrecord"), print, batch_size=2
    ),
    "data.cached: sha256": lambda tmp: data.cached(str(tmp / "ones.npy"), tmp, sha256="abc"),
}


def damaged(folder):
    """Returns a folder after a byte of each file in it is changed."""
    kd.barrier()
    if RANK == 0:
        for path in [each for each in folder.rglob("*") if each.is_file()]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
    kd.barrier()
    return folder


DATA = {
    "shard: a number": lambda: data.shard(3),
    "shard: batch_size": lambda: data.shard(X, 0),
    "shard: shuffle": lambda: data.shard(X, 2, shuffle="local"),
    "shard: remainder": lambda: data.shard(X, 2, remainder="cut"),
    "shard: seed": lambda: data.shard(X, 2, seed="one"),
    "shard: steps": lambda: data.shard(X, 2, steps=100),
    "shard: global_batch_size": lambda: data.shard(X, global_batch_size=3),
    "shard: both sizes": lambda: data.shard(X, 3, global_batch_size=4),
    "shard: lengths": lambda: data.shard((X, X[:4]), 2),
    "shard: too few samples": lambda: data.shard(X[:1], 2),
    "shard: a scalar": lambda: data.shard((X, 1.0), 2),
    "shard: arguments that differ": lambda: data.shard(X, 2 + RANK),
    "shard: an iterator without steps": lambda: data.shard(iter([X])),
    "shard: a generator with an order": lambda: data.shard(
        lambda: iter([X]), steps=1, shuffle="global"
    ),
    "set_epoch: a list": lambda: data.set_epoch([X], 1),
    "steps_per_epoch": lambda: data.steps_per_epoch(8, 0),
    "prefetch": lambda: data.prefetch(data.shard(X, 2), 0),
    "gather": lambda: kd.gather(X, data.shard(X, 2)),
}

JOBS = {
    "run: on a rank": lambda: kd.run(print, np=2),
    "WorldServer: size": lambda: kd.WorldServer(0),
    "WorldServer: token": lambda: kd.WorldServer(2, token=""),
    "join_world: address": lambda: kd.join_world("host", 0, 2, "token"),
    "KerasState: not built": lambda: elastic.KerasState(model_of(built=False)),
    "ObjectState: a directory by position": lambda: elastic.ObjectState("folder"),
    "KERAS_DIST_REDUCE": lambda: with_variable("KERAS_DIST_REDUCE", "read"),
    "KERAS_DIST_STALL_SECONDS": lambda: with_variable("KERAS_DIST_STALL_SECONDS", "soon"),
    "KERAS_DIST_ON_FAILURE": lambda: with_variable("KERAS_DIST_ON_FAILURE", "ignore"),
    "KERAS_DIST_ON_FAILURE: replace": lambda: with_variable("KERAS_DIST_ON_FAILURE", "replace"),
    "KERAS_DIST_JOIN_DIRECTORY": lambda: with_variable("KERAS_DIST_JOIN_DIRECTORY", "job"),
    "explain": lambda: raise_error(errors.explain("[here]", "one", "two", "Pass one.")),
}


def raise_error(text):
    raise errors.KerasDistError(text)


def text_of(call, folder):
    """Returns type and text of the error that a call raises, without what differs by machine."""
    try:
        call()
    except Exception as error:
        found = f"{type(error).__name__}: {error}".rstrip().replace(str(folder), "<folder>")
        found = re.sub(r"/\.[0-9a-f]{16}\.", "/.<random>.", found)
        return re.sub(r"\b([0-9a-f]{64}|[0-9a-f]{32})\b", "<digest>", found)
    return "nothing is raised"


def together(texts):
    """Returns the texts of both ranks as one, if they are alike."""
    if len(set(texts)) > 1:
        own = [text.replace(f"[rank {n} of 2]", "[rank r of 2]") for n, text in enumerate(texts)]
        texts = own if len(set(own)) == 1 else texts
    if len(set(texts)) > 1:
        texts = [f"on rank {rank}: {text}" for rank, text in enumerate(texts)]
    return "\n".join(dict.fromkeys(texts))


@pytest.mark.long
@pytest.mark.limit(300)
@pytest.mark.parity("the same texts of errors")
def test_each_text_is_that_of_the_golden_file(shared_tmp_path):
    keras.utils.clear_session()  # names are numbered from the first
    files(shared_tmp_path)
    on_files = {title: functools.partial(call, shared_tmp_path) for title, call in FILES.items()}
    texts = []
    for title, call in (OPERATIONS | OPTIMIZERS | CALLBACKS | on_files | DATA | JOBS).items():
        mine = text_of(call, shared_tmp_path)
        texts.append(f"# {title}\n{together(kd.allgather_object(mine))}\n")
    golden.check("errors.txt", "\n".join(texts))
