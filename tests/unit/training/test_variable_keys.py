"""Keys of variables: paths without the numbers that Keras adds."""

import pytest

from keras_dist.training.rank_gradients import variable_keys


@pytest.mark.parametrize(
    ("paths", "same"),
    [
        (("dense/kernel", "dense_1/kernel"), ("dense_4/kernel", "dense_5/kernel")),
        (("sequential/dense/kernel",), ("dense_3/kernel",)),
        (("dense_1/kernel", "dense/kernel"), ("dense_3/kernel", "dense_2/kernel")),
        (("conv2d/kernel", "dense_2/bias"), ("conv2d_7/kernel", "dense/bias")),
        (("variable", "variable_1"), ("variable_13", "variable_14")),
    ],
)
def test_automatic_numbers_count_from_the_first(paths, same):
    assert variable_keys(paths) == variable_keys(same)


def test_the_name_of_the_model_does_not_count():
    assert variable_keys(("model/hidden/kernel",), "model") == variable_keys(("hidden/kernel",))
    assert variable_keys(("other/kernel",), "model") != variable_keys(("kernel",))


@pytest.mark.parametrize(
    ("paths", "other"),
    [
        (("head_0/kernel",), ("head_1/kernel",)),
        (("variable", "variable_1"), ("variable", "variable_2")),
        (("dense/kernel", "dense_1/kernel"), ("dense_1/kernel", "dense/kernel")),
        (("dense/kernel", "dense_1/kernel"), ("dense/kernel", "dense_2/kernel")),
        (("left/kernel",), ("right/kernel",)),
    ],
)
def test_other_variables_have_other_keys(paths, other):
    assert variable_keys(paths) != variable_keys(other)
