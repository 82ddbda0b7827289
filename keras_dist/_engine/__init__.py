"""The engine, without frameworks: numpy arrays in and out. Others use only the names below."""

from keras_dist._engine import collectives, point_to_point, tracing
from keras_dist._engine.arithmetic import ReduceOp, parse_factor, parse_op
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.collectives.allgather import FusedAllgather
from keras_dist._engine.collectives.compressed import CompressedAllreduce
from keras_dist._engine.collectives.exchanges import Feedback
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.tables import TableRows
from keras_dist._engine.communicator import Communicator, ranks_of, subset
from keras_dist._engine.compression import (
    Compression,
    Compressor,
    parse_compression,
    parse_gradient_compression,
)
from keras_dist._engine.faults import progress
from keras_dist._engine.gradient_compression import GradientCompression
from keras_dist._engine.gradient_sets import Form, GradientSet, UnlikeGradients
from keras_dist._engine.mpi import library
from keras_dist._engine.mpi_file import File
from keras_dist._engine.nccl.path import GpuPath, path_of, set_gpus
from keras_dist._engine.ordering.order import set_completion
from keras_dist._engine.ordering.ticket import Handle
from keras_dist._engine.point_to_point import clock_offset
from keras_dist._engine.recovery import Retry
from keras_dist._engine.shm import wait
from keras_dist._engine.sideband import Inquiries, Mailbox, height
from keras_dist._engine.signature import (
    BucketOptions,
    CollectiveSignature,
    JoinedRanks,
    OpOptions,
    entries_of,
)
