from .fit_ranks import (
    fit_communicator as fit_communicator,
)
from .fit_ranks import (
    fit_communicators as fit_communicators,
)
from .fit_ranks import (
    fit_rank as fit_rank,
)
from .fit_ranks import (
    fit_set as fit_set,
)
from .fit_ranks import (
    fit_size as fit_size,
)
from .fit_ranks import (
    fit_within as fit_within,
)
from .job import (
    add_process_set as add_process_set,
)
from .job import (
    can_survive_rank_loss as can_survive_rank_loss,
)
from .job import (
    communicator as communicator,
)
from .job import (
    communicators as communicators,
)
from .job import (
    cross_rank as cross_rank,
)
from .job import (
    cross_size as cross_size,
)
from .job import (
    detach as detach,
)
from .job import (
    find_process_set as find_process_set,
)
from .job import (
    has_mpi as has_mpi,
)
from .job import (
    includes_me as includes_me,
)
from .job import (
    init as init,
)
from .job import (
    is_homogeneous as is_homogeneous,
)
from .job import (
    is_initialized as is_initialized,
)
from .job import (
    local_rank as local_rank,
)
from .job import (
    local_size as local_size,
)
from .job import (
    notify as notify,
)
from .job import (
    rank as rank,
)
from .job import (
    ranks_by_id as ranks_by_id,
)
from .job import (
    ranks_of as ranks_of,
)
from .job import (
    remove_process_set as remove_process_set,
)
from .job import (
    shutdown as shutdown,
)
from .job import (
    size as size,
)
from .job import (
    survive_rank_loss as survive_rank_loss,
)
from .job import (
    where as where,
)
