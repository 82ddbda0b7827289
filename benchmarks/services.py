"""What ranks send outside of reductions, for scale.py: initialization, agreement, an inquiry.

An inquiry is how the stall watchdog and `keras-dist top` ask all ranks. Its tree, and the size of
its answers, come from the modules that the engine runs. Ranks of a node exchange messages in
memory, which takes no time here.
"""

import functools
import pickle

from common import table
from messages import FAULTS, TITLES, TOP, all_to_the_root, judge

from keras_dist._engine.faults.rank_state import RankState
from keras_dist._engine.mpi.peers import rounds
from keras_dist._engine.sideband import ANSWER, QUESTION, branches

COLLECTIVES = 10  # of MPI in `keras_dist.init`, as messages.py counts them
ENTRY_NBYTES = 200  # of a rank in one of them: versions, host name, process
PLANNED = [1024, 8192, 80_000]  # ranks whose messages follow from the plans
STACKS = "  File 'train.py', line 100, in fit\n" * 60


def initialization(nodes, ranks):
    """Returns the phases of one of the collectives: what is known doubles in each round.

    Args:
        nodes: number of nodes.
        ranks: number of ranks on each node.
    """
    plans = [rounds(node, nodes, 1) for node in range(nodes)]
    longest = max(map(len, plans))
    # Some nodes have a round before and after those in which all others take part.
    plans = [
        [None, *plan, None] if len(plan) == longest - 2 and plan[0].received else plan
        for plan in plans
    ]
    known = ranks * ENTRY_NBYTES
    phases = []
    for number in range(longest):
        messages = [
            (node, plan[number].peer, min(2**number, nodes) * known)
            for node, plan in enumerate(plans)
            if number < len(plan) and plan[number] and plan[number].sent
        ]
        phases.append([messages])
    return phases


def inquiry(nodes, ranks):
    """Returns the phases of an inquiry of rank 0: questions downward, answers upward.

    Args:
        nodes: number of nodes.
        ranks: number of ranks on each node.
    """
    questions, answers = [], []

    def ask(level, asker, below):
        if level == len(questions):
            questions.append([])
            answers.append([])
        for place, branch in enumerate(branches(below)):
            if place == len(questions[level]):
                questions[level].append([])
                answers[level].append([])
            if asker // ranks != branch[0] // ranks:
                ends = asker // ranks, branch[0] // ranks
                questions[level][place].append((*ends, question_nbytes(len(branch))))
                answers[level][place].append((*ends[::-1], answer_nbytes(len(branch))))
            if len(branch) > 1:
                ask(level + 1, branch[0], branch[1:])

    ask(0, 0, range(1, nodes * ranks))
    return questions + answers[::-1]


def inquiry_messages(ranks):
    """Returns the messages that rank 0 exchanges in an inquiry."""
    # Of a rank with others below it come two answers: its own, and theirs.
    return sum(2 + (len(branch) > 1) for branch in branches(range(1, ranks)))


def stall_messages(ranks):
    """Returns the messages that rank 0 exchanges at most in a period of the stall watchdog."""
    # Of each child come up to two alarms, each with its confirmation.
    return inquiry_messages(ranks) + 4 * len(branches(range(1, ranks)))


def agreement_messages(nodes):
    """Returns the messages that node 0 exchanges before a reduction."""
    steps = rounds(0, nodes, 1)
    return sum((step.sent is not None) + (step.received is not None) for step in steps)


@functools.cache
def question_nbytes(count):
    """Returns the size of a question that reaches some ranks."""
    return len(pickle.dumps((QUESTION, 0, (0, 1), range(1, count))))


@functools.cache
def answer_nbytes(count):
    """Returns the size of the answers of some ranks that wait in the same place."""
    if count > 1000:  # it grows linearly
        return count * answer_nbytes(1000) // 1000
    waits = (((0, 1), "allreduce of 'dense/kernel'", 60.0),)
    found = {rank: RankState(waits, "in fit, epoch 1, update 1", STACKS) for rank in range(count)}
    return len(pickle.dumps((ANSWER, 0, (0, 1), found, True)))


# --- what came out ---------------------------------------------------------------------------


def messages_of_root(counted, ranks_of_node):
    """Returns the lines of the table of the messages of the root: counted, then planned.

    Args:
        counted: see `count_messages`.
        ranks_of_node: number of ranks on each node in the plans.
    """
    planned = {ranks: dict.fromkeys(TITLES, "") for ranks in PLANNED}
    for ranks, row in planned.items():
        row |= {"init": COLLECTIVES, TOP: inquiry_messages(ranks)}
        row |= dict.fromkeys(FAULTS, f"<= {stall_messages(ranks)}")
    runs = {**counted, **planned}
    rows = [
        [
            title,
            *(run[name][0] if isinstance(run[name], list) else run[name] for run in runs.values()),
        ]
        for name, title in TITLES.items()
    ]
    # Ranks on one node agree in shared memory.
    agreed = [
        agreement_messages(ranks // ranks_of_node) if ranks in planned else 0 for ranks in runs
    ]
    rows.insert(1, ["agreement before a reduction", *agreed])
    head = ["", *(f"{ranks:,} ranks" for ranks in runs)]
    text = f"**Messages of the root; from {PLANNED[0]:,} ranks on, by the plans**"
    return [text, "", table(head, rows + all_to_the_root(runs))]


def judge_counted(counted):
    """Returns the rows of what was counted: at most a number for any job, and as planned."""
    rows = judge(counted)
    for ranks, run in counted.items():
        for name, planned in ("init", COLLECTIVES), (TOP, inquiry_messages(ranks)):
            count = run[name] if name == "init" else run[name][0]
            rows.append(
                (f"{TITLES[name]}, {ranks} ranks, as planned", planned, count, count == planned)
            )
    return rows
