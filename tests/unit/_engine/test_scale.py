"""The plan that benchmarks/scale.py simulates is what the engine sends."""

import importlib
import itertools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import thread_ranks

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, Wire
from keras_dist._engine.mpi import peers
from keras_dist._engine.mpi.peers import Payload, Peers
from keras_dist._engine.mpi.reduction import Combination, reduce_through_mpi

FOLDER = Path(__file__).parents[3] / "benchmarks"
MODULES = ["collectives/cross_node", "mpi/peers", "mpi/reduction", "mpi/topology", "sideband"]


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder of the benchmark; its modules have common names, and are removed."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield
    ours = {path.stem for path in FOLDER.glob("*.py")}
    for name in ours & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def scale(benchmarks):
    """What simulates the plans."""
    return importlib.import_module("scale")


@pytest.fixture
def plans(benchmarks):
    """What makes the plans."""
    return importlib.import_module("plans")


@pytest.fixture
def messages(monkeypatch):
    """By sender, receiver and tag, the bytes that threads in the place of nodes have sent."""
    sent, lock, send = {}, threading.Lock(), thread_ranks.Rank.Isend

    def recording(self, buffer, peer, tag):
        with lock:
            sent.setdefault((self.rank, peer, tag), []).append(buffer.nbytes)
        return send(self, buffer, peer, tag)

    monkeypatch.setattr(thread_ranks.Rank, "Isend", recording)
    return sent


@pytest.mark.parametrize("nbytes", [4096, 262_144, 4_800_000, 4_800_064, 40_000_000])
@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 12])
def test_nodes_that_reduce_send_what_is_simulated(plans, messages, nodes, nbytes):
    case = plans.Case("star", 25, nodes, nbytes)
    sums = Combination(ReduceOp.SUM, 1, [[node] for node in range(nodes)])
    wire, exchanged = Wire(Compression.none, plans.DTYPE, ""), plans.exchanged(case)
    rows = [np.full(exchanged.nbytes // 4, node, "f4") for node in range(nodes)]

    def reduce(world):
        row, compared = rows[world.rank], Peers(world)
        if not exchanged.travels:
            return reduce_through_mpi(world, row, row, sums, wire, plans.are_slow(case))
        legs = compared.legs(row.size, row.dtype)
        payload = Payload(legs, ReduceOp.SUM, 1, lambda _: row.copy(), row)
        return any(compared.compare(bytes(16), True, payload))

    thread_ranks.Network(nodes).run(reduce)
    assert (rows[0] == sum(range(nodes))).all()
    recorded = {}
    for node, steps in enumerate(plans.recorded(case, range(nodes))):
        for peer, tag, size in itertools.chain(*(sends for sends, _ in steps)):
            recorded.setdefault((node, peer, tag), []).append(size)
    assert recorded == messages
    simulated = [m for phase in plans.plan_of(case) for group in phase for m in group]
    assert sorted(simulated) == sorted(
        (sender, receiver, 8 * nbytes)  # the ranks of a node
        for (sender, receiver, _), sizes in messages.items()
        for nbytes in sizes
    )


@pytest.mark.parametrize("nodes", [2, 8, 12])
def test_in_a_ring_and_by_halves_all_bytes_travel(plans, nodes):
    nbytes = 12 * 2**20
    [[ring]] = plans.plan_of(plans.Case("star", 25, nodes, nbytes, plans.RING))
    assert ring == [(node, (node + 1) % nodes, nbytes // nodes) for node in range(nodes)]
    phases = plans.plan_of(plans.Case("star", 25, nodes, nbytes, plans.MPICH))
    sent = sum(m[2] for phase in phases for group in phase for m in group)
    whole = 1 << nodes.bit_length() - 1  # the others send all, and receive all
    assert sent == 2 * (whole - 1 + nodes - whole) * nbytes


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 12])
def test_nodes_that_compare_digests_send_what_is_simulated(plans, messages, nodes):
    network = thread_ranks.Network(nodes)
    answers = network.run(lambda world: any(Peers(world).compare(bytes(16), True)))
    assert len(answers) == nodes
    plan = plans.plan_of(plans.Case("star", 25, nodes, 0))
    simulated = [message for phase in plan for group in phase for message in group]
    assert sorted(simulated) == sorted(
        (sender, receiver, nbytes)
        for (sender, receiver, _), sizes in messages.items()
        for nbytes in sizes
    )


def test_a_message_travels_once_both_nodes_have_come_to_it(plans):
    # Node 2 waits for node 1, which exchanges with node 0 first.
    first = [([(1, 0, 10)], [(1, 0)])]
    second = [([(0, 0, 10)], [(0, 0)]), ([(2, 0, 30)], [(2, 0)])]
    third = [([(1, 0, 30), (1, 1, 5)], [(1, 0)])]
    second[1][1].append((2, 1))
    assert plans.in_phases([first, second, third]) == [
        [[(0, 1, 10), (1, 0, 10)]],
        [[(1, 2, 30), (2, 1, 30)], [(2, 1, 5)]],
    ]


def test_plans_that_do_not_match_are_refused(plans):
    with pytest.raises(SystemExit, match="a node would wait for ever"):
        plans.in_phases([[([(1, 0, 10)], [])], [([], [(0, 1)])]])


def test_pieces_are_sent_one_after_the_other_and_two_are_under_way(plans):
    plan = plans.plan_of(plans.Case("star", 25, 8, 1_000_000_000))
    # A phase has the results of a piece, and the contributions to the one after the next.
    assert [len(phase) for phase in plan] == [14] * (len(plan) - 2) + [7, 7]
    assert all(sorted(m[0] for m in group) == [*range(8)] for phase in plan for group in phase)


NODES, GBITS, SIZES = [2, 8, 12, 64, 1024], [25, 100], [4_800_000, 40_000_000, 1_000_000_000]


def test_cells_are_marked_where_the_engine_halves(scale, plans):
    swapped = set()
    for nodes, gbit, nbytes in itertools.product(NODES, GBITS, SIZES):
        case = plans.Case("star", gbit, nodes, nbytes)
        tags = {tag for sends, _ in plans.recorded(case, [0])[0] for _, tag, _ in sends}
        found = {case._replace(plan=plan): 1.0 for plan in plans.PLANS}
        marked = scale.cell(found, case).endswith(" h")
        assert marked == (peers.HALF in tags), case
        swapped.add((marked, plans.way(case._replace(gbit=nodes, nodes=gbit)) == "halves"))
    # The number of nodes in the place of Gbit/s would be noticed.
    assert swapped & {(True, False), (False, True)}


def test_a_cell_without_simulation_has_the_formula_in_brackets(scale, plans):
    case = plans.Case("star", 25, 1024, 1_000_000_000)
    assert scale.simulated(None, case) is None
    found = {case: None, case._replace(plan=plans.RING): 1.5e-3, case._replace(plan="MPICH"): 2e-5}
    assert scale.cell(found, case) == f"({scale.formula(case) * 1e3:.0f}) / 1.50 / 0.02 p"
    assert scale.cell(found, case._replace(nodes=1)) == "0"


def test_the_table_is_as_old_as_the_plan(scale):
    tables = importlib.import_module("tables")
    measures = tables.TABLES["scale"].measures
    assert {f"keras_dist/_engine/{name}.py" for name in MODULES} <= set(measures)
    assert {f"benchmarks/{name}.py" for name in ("network", "plans", "services")} <= set(measures)


def test_the_figure_goes_to_the_page_with_the_table(scale, tmp_path):
    tables = importlib.import_module("tables")
    assert tables.TABLES["scale"].figures == ("docs/images/scale.svg",)
    assert (tables.ROOT / tables.TABLES["scale"].figures[0]).exists()
    table = tables.Table("scale.py", "scale", (), figures=("docs/images/scale.svg",))
    results, root = tmp_path / "results", tmp_path / "root"
    results.mkdir()
    (root / "docs/images").mkdir(parents=True)
    with pytest.raises(SystemExit, match="matplotlib"):
        tables.copy_figures(table, results, root)
    (results / "scale.svg").write_text("<svg/>")
    tables.copy_figures(table, results, root)
    assert (root / "docs/images/scale.svg").read_text() == "<svg/>"
    tables.copy_figures(tables.Table("fit.py", "fit", ()), results, root)  # has none


def test_a_figure_may_have_lines_alone(scale, plans, tmp_path):
    pyplot = scale.plotter() or pytest.skip("matplotlib is not installed")
    cases = [plans.Case("star", gbit, 1024, 2**30) for gbit in scale.GBITS]
    found = {case._replace(plan=plan): None for case in cases for plan in plans.PLANS}
    drawn = []
    for _ in range(2):
        scale.draw(pyplot, found, [1, 1024], [2**30], {2**30: "1 GiB"}, tmp_path)
        drawn.append((tmp_path / "scale.svg").read_text())
    assert "1 GiB, ring" in drawn[0] and drawn[0] == drawn[1]


@pytest.mark.parametrize(("gbit", "slow"), [(1, True), (25, False), (100, False)])
def test_links_are_as_slow_as_the_network(plans, gbit, slow):
    assert plans.are_slow(plans.Case("star", gbit, 8, 40_000_000)) == slow


def test_a_fast_network_gets_large_pieces(plans):
    # Segments of 62.5 MB travel in pieces of at most 8 MiB, to one other node, and results back.
    assert plans.of_first_node(plans.Case("star", 25, 2, 1_000_000_000))[0] == 2 * 8
