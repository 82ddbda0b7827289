"""The hooks that a callback of a user sees in a fit, whole and resumed: tests/golden/hooks.txt."""

import golden
import keras
import pytest
from interrupting import Interrupt, Interrupted
from small_training import distributed, make_data

import keras_dist
from keras_dist.callbacks import BackupAndRestore, ShardedCheckpoint

pytestmark = pytest.mark.jobs("tensorflow-2", "jax-2", "torch-2")

HOOKS = [name for name in sorted(vars(keras.callbacks.Callback)) if name.startswith("on_")]
STEPS = 3


class Trace(keras.callbacks.Callback):
    """Notes each hook with its epoch or batch, its logs, and the steps of the optimizer."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def note(self, hook, *arguments):
        *place, logs = arguments
        if hook == "on_epoch_end":
            logs = {name: value for name, value in logs.items() if isinstance(value, float)}
        words = [hook, *map(str, place), *sorted(logs or ())]
        if "train" in hook or "epoch" in hook:
            words.append(f"| {int(self.model.optimizer.iterations)} steps")
        self.lines.append(" ".join(words))


def noting(hook):
    """Returns a hook that notes its call. Keras calls some with `logs` as a keyword."""
    if "batch" in hook or "epoch" in hook:
        return lambda self, place, logs=None: self.note(hook, place, logs)
    return lambda self, logs=None: self.note(hook, logs)


# Hooks of batches in evaluation have names of their own; the aliases would count them twice.
for name in HOOKS:
    if name not in ("on_batch_begin", "on_batch_end"):
        setattr(Trace, name, noting(name))


def traced(*callbacks):
    """Returns the text of a fit of two epochs, which may be interrupted."""
    trace = Trace()
    eagerly = keras.backend.backend() == "tensorflow"  # tracing takes longest
    model = distributed(keras.optimizers.Adam(0.01), metrics=["accuracy"], run_eagerly=eagerly)
    x, y = make_data(4 * STEPS, seed=keras_dist.rank())
    held_out = make_data(8, seed=9)
    callbacks = keras_dist.callbacks(*callbacks, trace)
    options = {"validation_data": held_out, "validation_batch_size": 4, "callbacks": callbacks}
    try:
        model.fit(x, y, 4, 2, shuffle=False, verbose=0, **options)
    except Interrupted:
        trace.lines.append("interrupted")
    keras_dist.barrier()
    return "".join(f"{line}\n" for line in trace.lines)


@pytest.mark.long
@pytest.mark.limit(300)
@pytest.mark.parity("the hooks of a resumed fit are those of the batches that are left")
def test_the_hooks_are_those_of_the_golden_file(shared_tmp_path):
    texts = {"without callbacks that resume": traced()}
    for kind, save_freq, at in (
        (BackupAndRestore, "epoch", (1, None)),
        (BackupAndRestore, 1, (0, 2)),  # after the last batch of an epoch
        (ShardedCheckpoint, 2, (1, 1)),  # one batch after the last write
    ):
        title = f"{kind.__name__}(save_freq={save_freq!r})"
        folder = shared_tmp_path / title
        texts[f"{title}: interrupted"] = traced(kind(folder, save_freq), Interrupt(*at))
        texts[f"{title}: resumed"] = traced(kind(folder, save_freq))
    alike = {}
    for title, text in texts.items():
        alike.setdefault(text, []).append(title)
    everything = "\n".join(
        "".join(f"# {title}\n" for title in titles) + text for text, titles in alike.items()
    )
    golden.check("hooks.txt", everything)
