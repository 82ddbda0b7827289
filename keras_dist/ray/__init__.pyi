from .executor import (
    RayExecutor as RayExecutor,
)
from .train_report import (
    ReportCallback as ReportCallback,
)
from .trainer import (
    KerasConfig as KerasConfig,
)
from .trainer import (
    KerasTrainer as KerasTrainer,
)
