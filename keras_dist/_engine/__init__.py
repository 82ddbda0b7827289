"""The engine: numpy arrays in, numpy arrays out. Knows MPI, knows no framework.

This is its face; other rooms import nothing from the modules behind it.
"""

from keras_dist._engine.arithmetic import ReduceOp, parse_factor, parse_op
from keras_dist._engine.background_services import BackgroundService
from keras_dist._engine.collectives.adasum import adasum, check_power_of_two
from keras_dist._engine.collectives.allgather import allgather, grouped_allgather
from keras_dist._engine.collectives.allreduce import allreduce
from keras_dist._engine.collectives.alltoall import alltoall
from keras_dist._engine.collectives.barrier import barrier
from keras_dist._engine.collectives.broadcast import broadcast, broadcast_into
from keras_dist._engine.collectives.buckets import plan_buckets
from keras_dist._engine.collectives.end_of_script import at_the_end
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.join import stand_in
from keras_dist._engine.collectives.objects import allgather_object, broadcast_object
from keras_dist._engine.collectives.pending import wait_first
from keras_dist._engine.collectives.piggyback import listen, notice, tell
from keras_dist._engine.collectives.reducescatter import reducescatter
from keras_dist._engine.collectives.rendezvous import tell_error, telling, times_met
from keras_dist._engine.collectives.signature import CollectiveSignature, JoinedRanks, entries_of
from keras_dist._engine.collectives.slices import reduce_slices
from keras_dist._engine.collectives.ticket import Handle
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression, Compressor, parse_compression
from keras_dist._engine.faults.progress import (
    begin_epoch,
    during,
    is_during,
    note_step,
    progress,
    say_progress,
)
from keras_dist._engine.faults.retry import Retry
from keras_dist._engine.mpi.files import File
from keras_dist._engine.mpi.library import (
    failed_process,
    is_communicator,
    is_cuda_aware,
    library,
    load_mpi,
    mpi_failure,
    outlives_processes,
    start_mpi,
    stop_mpi,
    take_names_away,
)
from keras_dist._engine.mpi.mailbox import Mailbox
from keras_dist._engine.mpi.subsets import places_of, subset
from keras_dist._engine.point_to_point import call_off, recv, send
from keras_dist._engine.rpc import RpcService
from keras_dist._engine.shm.wait import waited_seconds, waits
from keras_dist._engine.tracing.clocks import clock_offset
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
from keras_dist._engine.tuning import best_bucket_nbytes

__all__ = [
    "BackgroundService",
    "CollectiveSignature",
    "Communicator",
    "Compression",
    "Compressor",
    "File",
    "FusedAllreduce",
    "Handle",
    "JoinedRanks",
    "Mailbox",
    "ReduceOp",
    "Retry",
    "RpcService",
    "TraceWriter",
    "adasum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "at_the_end",
    "barrier",
    "begin_epoch",
    "best_bucket_nbytes",
    "broadcast",
    "broadcast_into",
    "broadcast_object",
    "call_off",
    "check_power_of_two",
    "clock_offset",
    "during",
    "entries_of",
    "failed_process",
    "flush_trace",
    "forget_trace",
    "grouped_allgather",
    "is_communicator",
    "is_cuda_aware",
    "is_during",
    "is_recording",
    "library",
    "listen",
    "load_mpi",
    "mpi_failure",
    "note_step",
    "notice",
    "open_trace",
    "outlives_processes",
    "parse_compression",
    "parse_factor",
    "parse_op",
    "places_of",
    "plan_buckets",
    "progress",
    "recv",
    "reduce_slices",
    "reducescatter",
    "say_progress",
    "send",
    "stand_in",
    "start_mpi",
    "start_trace",
    "step",
    "stop_mpi",
    "stop_trace",
    "subset",
    "take_names_away",
    "tell",
    "tell_error",
    "telling",
    "times_met",
    "wait_first",
    "waited_seconds",
    "waits",
]
