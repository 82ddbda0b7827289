"""The progress of tasks that several threads run at the same time."""

import threading

from keras_dist import _engine
from keras_dist._engine.faults.progress import count_update

describe = _engine.progress.describe_progress


def test_threads_have_progress_of_their_own_also_in_threads_that_act_for_them():
    begun, goes_on = threading.Event(), threading.Event()
    found = []

    def beside():
        with _engine.progress.during("fit"):
            _engine.progress.acts_among([0, 1])
            _engine.progress.begin_epoch(4)
            begun.set()
            goes_on.wait(100)
            found.append(describe())

    thread = threading.Thread(target=beside)
    with _engine.progress.during("fit"), _engine.progress.during("evaluate"):
        _engine.progress.acts_among([0, 1, 2])
        thread.start()
        assert begun.wait(100)
        host = threading.Thread(target=count_update, args=([0, 1],))
        host.start()
        host.join(100)
        assert describe([0, 1]) == "in evaluate within fit"  # of this thread, whatever the ranks
        of_host = []
        for ranks in ([0, 1], [0, 1, 2]):
            host = threading.Thread(target=lambda ranks=ranks: of_host.append(describe(ranks)))
            host.start()
            host.join(100)
        assert of_host == ["in fit, epoch 5, update 1", "in evaluate within fit"]
        goes_on.set()
        thread.join(100)
    assert found == ["in fit, epoch 5, update 1"]
    assert describe() == "after fit"
