from .progress import (
    ProgressCallback as ProgressCallback,
)
