"""Tables on pages that are made of the sources: environment variables, and options.

After a change that is meant, this command writes them anew:

    GOLDEN=write .venv/bin/python -m pytest tests/house/test_made_tables.py
"""

import os
import re

import pages
import pytest

from keras_dist import config
from keras_dist.launch.cli.options import OPTIONS, REFUSED
from keras_dist.runtime.startup import ALIKE

BEGIN, END = "<!-- made by tests/house/test_made_tables.py -->\n", "<!-- end -->\n"

# As listed by `horovodrun --help` of version 0.28.
HOROVODRUN = set(
    "-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout "
    "--network-interfaces --network-interface --output-filename --verbose --config-file "
    "-p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity "
    "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
    "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune "
    "--autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample "
    "--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc "
    "--max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit "
    "--blacklist-cooldown-range --timeline-filename --timeline-mark-cycles "
    "--no-timeline-mark-cycles --stall-check --no-stall-check "
    "--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds "
    "--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args "
    "--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level "
    "--log-with-timestamp --log-without-timestamp -prefix-timestamp "
    "--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp "
    "-H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun".split()
)


def variables():
    """Yields the rows of docs/configuration.md."""
    yield from ("| variable | default | values | meaning |", "|---|---|---|---|")
    for variable in config.VARIABLES:
        star = " \\*" if variable.field in ALIKE else ""
        default = f"`{variable.default}`" if variable.default else "empty"
        other = f" `{variable.other_name}` is accepted too." if variable.other_name else ""
        meaning = f"{variable.expected} | {variable.meaning}{other}"
        yield f"| `{variable.name}`{star} | {default} | {meaning} |"


def options():
    """Yields the rows of docs/launching.md."""
    yield from ("| option | meaning | environment variable | horovodrun |", "|---|---|---|---|")
    for option in OPTIONS:
        value = f" {option.metavar}" if option.metavar else ""
        names = ", ".join(f"`{name}{value}`" for name in option.names.split())
        horovod = ", ".join(f"`{name}`" for name in option.horovod.split())
        variable = option.variable and f"`{option.variable}`"
        yield f"| {names} | {option.meaning} | {variable} | {horovod} |"
    yield from ("", "These options of `horovodrun` are refused:", "", "| option | what to do |")
    yield "|---|---|"
    for remedy in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{name}`" for name, its in REFUSED.items() if its == remedy)
        yield f"| {names} | {remedy} |"


@pytest.mark.parametrize(("page", "rows"), [("configuration", variables), ("launching", options)])
def test_a_table_is_that_of_the_sources(page, rows):
    path = pages.ROOT / "docs" / f"{page}.md"
    head, _, tail = re.split(f"{BEGIN}|{END}", path.read_text())
    table = "".join(f"{row}\n" for row in rows())
    text = f"{head}{BEGIN}{table}{END}{tail}"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert path.read_text() == text, __doc__


def test_every_option_of_horovodrun_is_accepted_or_answered():
    accepted = {name for option in OPTIONS for name in option.horovod.split()}
    assert accepted | set(REFUSED) == HOROVODRUN
    assert not accepted & set(REFUSED)


def test_variables_of_options_are_those_of_keras_dist():
    known = {variable.name for variable in config.VARIABLES}
    assert {option.variable for option in OPTIONS if option.variable} <= known
