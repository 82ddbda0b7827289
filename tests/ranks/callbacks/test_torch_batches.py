"""The first batches of ranks are compared, or left alone, whatever tensors of torch they hold."""

import warnings

import keras
import pytest
import torch

import keras_dist

pytestmark = pytest.mark.jobs("torch-2")


class Dense(keras.layers.Layer):
    """Makes dense tensors of floatx of what a loader yields."""

    def __init__(self):
        super().__init__(autocast=False)

    def call(self, x):
        return (x.to_dense() if x.is_sparse else x).float()


@pytest.mark.parametrize("kind", ["bfloat16", "sparse"])
def test_tensors_that_numpy_does_not_know(kind):
    def batch(samples):
        x = torch.stack(samples)
        return (x.to_sparse() if kind == "sparse" else x.bfloat16()), x[:, :1]

    model = keras.Sequential([Dense(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, collate_fn=batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(loader, verbose=0, callbacks=keras_dist.callbacks())
    told = ["first batch" in str(one.message) for one in caught]
    assert keras_dist.allgather_object(any(told)) == [
        kind == "bfloat16" and rank == 0 for rank in range(keras_dist.size())
    ]
    # Each of two steps takes a tenth of twice its error from two weights and the bias.
    first = 2.0 - 0.1 * 2 * 3
    kernel = 1.0 - 0.2 - 0.2 * (first - 1.0)
    assert model.get_weights()[0][:, 0].tolist() == pytest.approx([kernel] * 2, rel=1e-5)
