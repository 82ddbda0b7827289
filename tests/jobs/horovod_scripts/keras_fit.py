"""A Horovod script with Keras' fit, in the style of tutorials."""

import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.random.set_seed(hvd.rank())
x = np.random.default_rng(hvd.rank()).random((320, 6)).astype("float32")
labels = (x.sum(axis=1) > 3).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, labels)).repeat().shuffle(1000).batch(16)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Dense(2, activation="softmax"),
    ]
)
scaled_lr = 0.01 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=scaled_lr, multiplier=1.0, start_epoch=1, end_epoch=3
    ),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(sys.argv[1] + "/checkpoint.keras"))
verbose = 1 if hvd.rank() == 0 else 0
history = model.fit(
    dataset, steps_per_epoch=40 // hvd.size(), callbacks=callbacks, epochs=3, verbose=verbose
)

weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
spread = hvd.allreduce(weights, op=hvd.Max) - hvd.allreduce(weights, op=hvd.Min)
loss = hvd.allreduce(history.history["loss"][-1], name="loss", average=True)
if hvd.rank() == 0:
    fell = loss < history.history["loss"][0]
    print(f"ranks {hvd.size()}, loss fell: {fell}, replicas apart: {float(np.abs(spread).max())}")
