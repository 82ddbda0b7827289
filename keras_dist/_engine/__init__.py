"""The engine: numpy arrays in, numpy arrays out. Independent of frameworks.

Other packages use the names below and nothing else.
"""

from keras_dist._engine import collectives, point_to_point, rank_tree, subsets, tracing
from keras_dist._engine.arithmetic import ReduceOp, parse_factor, parse_op
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.clocks import clock_offset
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.fused_allgather import FusedAllgather
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression, Compressor, parse_compression
from keras_dist._engine.faults import progress
from keras_dist._engine.files import File
from keras_dist._engine.gradient_sets import Form, GradientSet, UnlikeGradients
from keras_dist._engine.inquiry import Inquiries
from keras_dist._engine.mpi import library
from keras_dist._engine.mpi.mailbox import Mailbox
from keras_dist._engine.nccl.path import GpuPath, RankGpu, path_of, set_gpus
from keras_dist._engine.options import BucketOptions, OpOptions
from keras_dist._engine.ordering.pending import set_completion
from keras_dist._engine.ordering.ticket import Handle
from keras_dist._engine.recovery.retry import Retry
from keras_dist._engine.shm import wait
from keras_dist._engine.signature import CollectiveSignature, JoinedRanks, entries_of
from keras_dist._engine.tuning import best_bucket_nbytes

__all__ = [
    "BucketOptions",
    "CollectiveSignature",
    "Communicator",
    "Compression",
    "Compressor",
    "File",
    "Form",
    "FusedAllgather",
    "FusedAllreduce",
    "GpuPath",
    "GradientSet",
    "Handle",
    "Inquiries",
    "JoinedRanks",
    "Mailbox",
    "OpOptions",
    "RankGpu",
    "ReduceOp",
    "Retry",
    "UnlikeGradients",
    "best_bucket_nbytes",
    "clock_offset",
    "collectives",
    "entries_of",
    "library",
    "parse_compression",
    "parse_factor",
    "parse_op",
    "path_of",
    "piggyback",
    "plan_buckets",
    "point_to_point",
    "progress",
    "rank_tree",
    "set_completion",
    "set_gpus",
    "subsets",
    "tracing",
    "wait",
]
