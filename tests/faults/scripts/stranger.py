"""Somebody without the token asks for the metrics of the job."""

import os
import urllib.error
import urllib.request

from bare import runtime
from faults import fault

runtime.init()
if runtime.rank() == 0:
    fault()
    url = f"http://127.0.0.1:{os.environ['KERAS_DIST_PROMETHEUS_PORT']}/metrics"
    try:
        urllib.request.urlopen(url, timeout=20)
    except urllib.error.HTTPError as refused:
        print("refused:", refused.code, refused.read(), flush=True)
