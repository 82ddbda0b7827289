"""Ranks in the executors of a real local Spark session."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import cloudpickle
import cluster_training
import pytest
from cluster_training import ENVIRONMENT, join, join_and_fail, train
from start_jobs import launcher

from keras_dist import errors

pyspark = pytest.importorskip("pyspark", reason="needs Spark: pip install 'keras_dist[spark]'")
pytest.importorskip("pyspark.sql", reason="needs all packages of Spark", exc_type=ImportError)

import keras_dist.spark  # noqa: E402


def java_version():
    """Returns the major version of the Java that Spark finds; 0 without one."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    try:
        printed = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', printed)  # Java 8 is 1.8
    return int(found[1]) if found else 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(launcher()) > 1, reason="needs MPICH"),
    pytest.mark.skipif(java_version() < 17, reason="Spark needs Java 17: default-jre-headless"),
]
cloudpickle.register_pickle_by_value(cluster_training)


@pytest.fixture(scope="module", autouse=True)
def session():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = pyspark.sql.SparkSession.builder.master("local[2]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "localhost",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    made = builder.config(map=settings).getOrCreate()
    yield made
    made.stop()


def test_a_function_trains_on_the_executors(monkeypatch):
    server = mock.Mock(wraps=keras_dist.spark.WorldServer)
    monkeypatch.setattr(keras_dist.spark, "WorldServer", server)
    first, second = keras_dist.spark.run(train, env=ENVIRONMENT)
    assert server.call_args.kwargs["host"] == "127.0.0.1"  # not localhost, which the ranks use
    assert first[:2] == (0, 2) and second[:2] == (1, 2) and first[2] == second[2]


@pytest.mark.parametrize("end", ["raises", "loses its worker"])
def test_a_lost_rank_is_an_error_and_the_session_stays(session, end):
    with pytest.raises(errors.RankError, match="rank 1 of 2") as caught:
        keras_dist.spark.run(join_and_fail, (end,), env=ENVIRONMENT)
    assert (end == "raises") == isinstance(caught.value.__cause__, ValueError)
    assert session.sparkContext.parallelize([1, 2], 2).sum() == 3


def test_ranks_that_do_not_come_are_named(session):
    with pytest.raises(errors.RankError, match=r"rank 0, 1, 2 of 3.* to join within 3 s"):
        keras_dist.spark.run(join, num_proc=3, start_timeout=3, env=ENVIRONMENT)
    assert session.sparkContext.parallelize([1, 2], 2).sum() == 3


def test_the_session_of_another_thread_is_found(session):
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(keras_dist.spark._context).result()
    assert found is session.sparkContext


def test_without_a_session(session):
    session.stop()
    with pytest.raises(errors.LaunchError, match="a Spark session"):
        keras_dist.spark.run(join)
