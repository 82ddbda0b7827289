"""Environment variables: parsing, errors and warnings."""

import warnings

import pytest

from keras_dist import config, errors


def test_defaults():
    settings = config.parse({})
    data = (0, 0, True, "auto", "copy", "ordered", "auto", "none")
    limits = (60, 600, "stop", 0, 0, False, "", True, "", "/dev/shm", "", (0, None), 100, True, 0)
    assert settings == config.Settings(*data, *limits, None, "", False)
    assert config.parse({"KERAS_DIST_PIN_DEVICE": "no"}).pin_device is False


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:2", ("::1", 2)),
        ("0", None),
    ],
)
def test_prometheus_uses_loopback_unless_an_address_is_given(text, endpoint):
    assert config.parse({"KERAS_DIST_PROMETHEUS_PORT": text}).prometheus_port == endpoint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BUCKET_NBYTES", "-1"),
        ("BUCKET_NBYTES", "1.5"),
        ("THREADS", "-1"),
        ("PIN_DEVICE", "maybe"),
        ("COMPRESSION", "zip"),
        ("STALL_SECONDS", "-1"),
        ("STALL_ABORT_SECONDS", "soon"),
        ("TOP_PORT", "65536"),
        ("PROMETHEUS_PORT", "localhost:"),
    ],
)
def test_an_invalid_value_is_an_error(name, text):
    with pytest.raises(errors.ArgumentError, match=f"KERAS_DIST_{name} to be .*{text}"):
        config.parse({f"KERAS_DIST_{name}": text})


def test_an_unknown_name_causes_a_warning():
    with pytest.warns(UserWarning, match="does not know .* KERAS_DIST_TREADS"):
        config.parse({"KERAS_DIST_TREADS": "2"})


def test_other_variables_are_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.parse({"OMP_NUM_THREADS": "2"}) == config.parse({})
