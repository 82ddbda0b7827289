"""Keys of variables: paths without the numbers that Keras adds."""

import pytest

from keras_dist.training.rank_gradients import variable_keys


@pytest.mark.parametrize(
    ("paths", "other", "are_alike"),
    [
        # Automatic numbers count from the first.
        (("dense/kernel", "dense_1/kernel"), ("dense_4/kernel", "dense_5/kernel"), True),
        (("sequential/dense/kernel",), ("dense_3/kernel",), True),
        (("dense_1/kernel", "dense/kernel"), ("dense_3/kernel", "dense_2/kernel"), True),
        (("conv2d/kernel", "dense_2/bias"), ("conv2d_7/kernel", "dense/bias"), True),
        (("variable", "variable_1"), ("variable_13", "variable_14"), True),
        (("head_0/kernel",), ("head_1/kernel",), False),
        (("variable", "variable_1"), ("variable", "variable_2"), False),
        (("dense/kernel", "dense_1/kernel"), ("dense_1/kernel", "dense/kernel"), False),
        (("dense/kernel", "dense_1/kernel"), ("dense/kernel", "dense_2/kernel"), False),
        (("left/kernel",), ("right/kernel",), False),
    ],
)
def test_other_variables_have_other_keys(paths, other, are_alike):
    assert (variable_keys(paths) == variable_keys(other)) == are_alike


def test_the_name_of_the_model_does_not_count():
    assert variable_keys(("model/hidden/kernel",), "model") == variable_keys(("hidden/kernel",))
    assert variable_keys(("other/kernel",), "model") != variable_keys(("kernel",))
