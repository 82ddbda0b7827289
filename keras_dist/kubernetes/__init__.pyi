from .train_job import (
    ProgressCallback as ProgressCallback,
)
