"""The trace of this process: spans, and the file to which they are written."""

from keras_dist._engine.tracing.spans import step
from keras_dist._engine.tracing.trace_writer import (
    TraceWriter,
    flush_trace,
    forget_trace,
    is_recording,
    open_trace,
    start_trace,
    stop_trace,
)
