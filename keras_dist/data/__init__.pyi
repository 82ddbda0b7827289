from .array_files import (
    npz as npz,
)
from .array_files import (
    parquet as parquet,
)
from .image_files import (
    image_dataset as image_dataset,
)
from .node_cache import (
    cached as cached,
)
from .prefetching import (
    prefetch as prefetch,
)
from .record_files import (
    tfrecord as tfrecord,
)
from .row_files import (
    hdf5 as hdf5,
)
from .row_files import (
    npy as npy,
)
from .sharding import (
    sample as sample,
)
from .sharding import (
    set_epoch as set_epoch,
)
from .sharding import (
    shard as shard,
)
from .sharding import (
    steps_per_epoch as steps_per_epoch,
)
from .tar_files import (
    tar as tar,
)
