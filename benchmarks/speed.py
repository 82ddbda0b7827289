"""Puts the speed of one model with each backend into one table, from the results of fit.

python benchmarks/fit.py --backend tensorflow; ... jax; ... torch
python benchmarks/speed.py [--model mlp]
"""

import json
import statistics

from common import options_of, parser, ratio, slug, table, write
from fit import CONTENDERS, WITH, base
from models import MODELS

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
SHOWN = ["none", "together", "ours"]


def main():
    made = parser(__doc__, quick="no difference")
    made.add_argument("--model", choices=list(MODELS), default="mlp")
    options = options_of(made, None)
    rows = [row(name, title, options) for name, title in BACKENDS.items()]
    head = ["backend", *(CONTENDERS[name] for name in SHOWN), "alternative"]
    text = table(head, rows)
    print(text)
    write(options.output, "speed", text)


def row(backend, title, options):
    """Returns the row of a backend, or ends with the command that measures it."""
    file = options.output / f"{slug(f'fit_{backend}')}.json"
    if not file.exists():
        raise SystemExit(f"no {file}: run benchmarks/fit.py --backend {backend}")
    found = json.loads(file.read_text())[options.model]
    peer = WITH[backend][-1]

    def cell(name):
        rate = f"{statistics.median(found[name]):.0f}"
        return f"{rate} ({ratio(found[name], found[base(name)]):.2f})" if name != "none" else rate

    return [title, *(cell(name) for name in SHOWN), f"{cell(peer)}, {CONTENDERS[peer]}"]


if __name__ == "__main__":
    main()
