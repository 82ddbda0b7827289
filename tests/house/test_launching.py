"""docs/launching.md lists the existing options.

python tests/house/test_launching.py writes the table.
"""

import re
from pathlib import Path

from keras_dist import config
from keras_dist.launch.cli.options import OPTIONS, REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "launching.md"
BEGIN, END = "<!-- made by tests/house/test_launching.py -->\n", "<!-- end -->\n"

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


def table():
    """Returns the text between the markers."""
    rows = ["| option | meaning | environment variable | horovodrun |", "|---|---|---|---|"]
    for option in OPTIONS:
        value = f" {option.metavar}" if option.metavar else ""
        names = ", ".join(f"`{name}{value}`" for name in option.names.split())
        horovod = ", ".join(f"`{name}`" for name in option.horovod.split())
        variable = option.variable and f"`{option.variable}`"
        rows.append(f"| {names} | {option.meaning} | {variable} | {horovod} |")
    rows += ["", "These options of `horovodrun` are refused:", "", "| option | what to do |"]
    rows.append("|---|---|")
    for remedy in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{name}`" for name, its in REFUSED.items() if its == remedy)
        rows.append(f"| {names} | {remedy} |")
    return "\n".join(rows) + "\n"


def written():
    """Returns the document with the current table."""
    head, _, tail = re.split(f"{BEGIN}|{END}", DOCUMENT.read_text())
    return f"{head}{BEGIN}{table()}{END}{tail}"


def test_the_table_is_that_of_the_parser():
    assert DOCUMENT.read_text() == written(), "python tests/house/test_launching.py writes it"


def test_every_option_of_horovodrun_is_accepted_or_answered():
    accepted = {name for option in OPTIONS for name in option.horovod.split()}
    assert accepted | set(REFUSED) == HOROVODRUN
    assert not accepted & set(REFUSED)


def test_variables_of_options_are_those_of_keras_dist():
    known = {variable.name for variable in config.VARIABLES}
    assert {option.variable for option in OPTIONS if option.variable} <= known


if __name__ == "__main__":
    DOCUMENT.write_text(written())
