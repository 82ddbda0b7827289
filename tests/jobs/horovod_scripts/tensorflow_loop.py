"""A Horovod training loop with TensorFlow, in the style of workshops."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    local_rank = hvd.local_rank()
    tf.config.experimental.set_visible_devices(gpus[local_rank], "GPU")

checkpoint_dir = sys.argv[1]
lr_init, batch_size, steps = 0.01, 16, 30
tf.random.set_seed(hvd.rank())
x = np.random.default_rng(0).random((64 * hvd.size(), 6)).astype("float32")
labels = (x.sum(axis=1) > 3).astype("int64")

dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(x[...], tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.shard(num_shards=hvd.size(), index=hvd.rank())
dataset = dataset.repeat().shuffle(1000).batch(batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.Input((6,)),
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(2, activation="softmax"),
    ]
)
loss_fn = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(lr_init * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def train_step(data, model, loss_fn, optimizer, first_batch):
    batch, target = data
    with tf.GradientTape() as tape:
        output = model(batch, training=True)
        loss = loss_fn(target, output)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss, output


losses = []
for step, data in enumerate(dataset.take(steps)):
    loss, output = train_step(data, model, loss_fn, optimizer, step == 0)
    acc = tf.reduce_mean(tf.cast(tf.argmax(output, 1) == data[1], tf.float32))
    global_loss = hvd.allreduce(loss, average=True)
    global_acc = hvd.allreduce(acc, average=True)
    losses.append(float(global_loss))

if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir + "/weights")
weights = np.concatenate([np.ravel(variable) for variable in model.variables])
spread = hvd.allreduce(weights, op=hvd.Max) - hvd.allreduce(weights, op=hvd.Min)
if hvd.rank() == 0:
    fell = losses[-1] < losses[0]
    print(f"ranks {hvd.size()}, loss fell: {fell}, replicas apart: {float(np.abs(spread).max())}")
