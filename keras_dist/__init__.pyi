from . import (
    callbacks as callbacks,
)
from . import (
    checkpoints as checkpoints,
)
from . import (
    data as data,
)
from . import (
    elastic as elastic,
)
from . import (
    errors as errors,
)
from . import (
    layers as layers,
)
from . import (
    metrics as metrics,
)
from . import (
    optimizers as optimizers,
)
from ._version import (
    __version__ as __version__,
)
from .data.gathering import (
    gather as gather,
)
from .launch.interactive import (
    run as run,
)
from .launch.world import (
    WorldServer as WorldServer,
)
from .launch.world import (
    join_world as join_world,
)
from .monitor.timeline.recording import (
    start_timeline as start_timeline,
)
from .monitor.timeline.recording import (
    stop_timeline as stop_timeline,
)
from .ops import (
    allgather as allgather,
)
from .ops import (
    allgather_object as allgather_object,
)
from .ops import (
    allreduce as allreduce,
)
from .ops import (
    alltoall as alltoall,
)
from .ops import (
    barrier as barrier,
)
from .ops import (
    broadcast as broadcast,
)
from .ops import (
    broadcast_ as broadcast_,
)
from .ops import (
    broadcast_object as broadcast_object,
)
from .ops import (
    grouped_allgather as grouped_allgather,
)
from .ops import (
    grouped_allreduce as grouped_allreduce,
)
from .ops import (
    grouped_reducescatter as grouped_reducescatter,
)
from .ops import (
    join as join,
)
from .ops import (
    reducescatter as reducescatter,
)
from .ops import (
    sparse_allreduce as sparse_allreduce,
)
from .ops.asynchronous import (
    Handle as Handle,
)
from .ops.asynchronous import (
    allgather_async as allgather_async,
)
from .ops.asynchronous import (
    allreduce_async as allreduce_async,
)
from .ops.asynchronous import (
    alltoall_async as alltoall_async,
)
from .ops.asynchronous import (
    broadcast_async as broadcast_async,
)
from .ops.asynchronous import (
    grouped_allgather_async as grouped_allgather_async,
)
from .ops.asynchronous import (
    grouped_allreduce_async as grouped_allreduce_async,
)
from .ops.asynchronous import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from .ops.asynchronous import (
    poll as poll,
)
from .ops.asynchronous import (
    reducescatter_async as reducescatter_async,
)
from .ops.asynchronous import (
    sparse_allreduce_async as sparse_allreduce_async,
)
from .ops.asynchronous import (
    synchronize as synchronize,
)
from .ops.reduce_op import (
    Adasum as Adasum,
)
from .ops.reduce_op import (
    Average as Average,
)
from .ops.reduce_op import (
    Compression as Compression,
)
from .ops.reduce_op import (
    Compressor as Compressor,
)
from .ops.reduce_op import (
    Max as Max,
)
from .ops.reduce_op import (
    Min as Min,
)
from .ops.reduce_op import (
    Product as Product,
)
from .ops.reduce_op import (
    ReduceOp as ReduceOp,
)
from .ops.reduce_op import (
    Sum as Sum,
)
from .ops.send_recv import (
    recv as recv,
)
from .ops.send_recv import (
    send as send,
)
from .ops.shared_errors import (
    raise_on_all as raise_on_all,
)
from .runtime import (
    add_process_set as add_process_set,
)
from .runtime import (
    cross_rank as cross_rank,
)
from .runtime import (
    cross_size as cross_size,
)
from .runtime import (
    init as init,
)
from .runtime import (
    is_homogeneous as is_homogeneous,
)
from .runtime import (
    is_initialized as is_initialized,
)
from .runtime import (
    local_size as local_size,
)
from .runtime import (
    remove_process_set as remove_process_set,
)
from .runtime import (
    shutdown as shutdown,
)
from .runtime.build_info import (
    ccl_built as ccl_built,
)
from .runtime.build_info import (
    cuda_built as cuda_built,
)
from .runtime.build_info import (
    ddl_built as ddl_built,
)
from .runtime.build_info import (
    gloo_built as gloo_built,
)
from .runtime.build_info import (
    gloo_enabled as gloo_enabled,
)
from .runtime.build_info import (
    mpi_built as mpi_built,
)
from .runtime.build_info import (
    mpi_enabled as mpi_enabled,
)
from .runtime.build_info import (
    mpi_threads_supported as mpi_threads_supported,
)
from .runtime.build_info import (
    nccl_built as nccl_built,
)
from .runtime.build_info import (
    rocm_built as rocm_built,
)
from .runtime.job import (
    local_rank as local_rank,
)
from .runtime.job import (
    rank as rank,
)
from .runtime.job import (
    size as size,
)
from .runtime.process_sets import (
    ProcessSet as ProcessSet,
)
from .runtime.process_sets import (
    global_process_set as global_process_set,
)
from .training.adapting import (
    adapt as adapt,
)
from .training.global_losses import (
    loss_scale as loss_scale,
)
from .training.local_steps import (
    LocalSteps as LocalSteps,
)
from .training.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)
from .training.optimizer import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from .training.prediction import (
    predict as predict,
)
from .training.random_generators import (
    separate_seeds as separate_seeds,
)
from .training.replicas import (
    verify_replicas as verify_replicas,
)
from .training.saving import (
    load_model as load_model,
)
