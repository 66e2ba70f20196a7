"""What spreading sequences over a rank's micro-batches brings, beside planned copies, on recorded routing.

python -m benchmarks.verl_micro_batches [FOLDER]    # from the repository; EQUILIBRA_TRACES: recordings; prints, and
                                                    # writes FOLDER/verl_micro_batches.md

verl's own partitions (Karmarkar-Karp on each data-parallel rank), and the same after `spread_partitions`. Eight ranks
are eight expert-parallel ranks; each draws 32 sequences and makes 8 micro-batches. Nothing is run: loads are counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tests.verl_engine import absent

from equilibra.core.cluster import Cluster
from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.events.imbalance import imbalance
from equilibra.integrations.verl.hooks import spread_partitions
from equilibra.plan.entry import plan_step
from equilibra.plan.pack import DENSE_COST
from equilibra.trace.count import sequence_loads
from equilibra.trace.open import load_trace

RANKS, SEQUENCES, MICRO_BATCHES, DRAWS = 8, 32, 8, 5
CLUSTER = Cluster(num_nodes=1, ranks_per_node=RANKS)
Partition = Callable[..., list[list[int]]]


def load_of(recorded: SequenceLoad, draw: int, partition: Partition, *, spread: bool) -> StepLoad:
    """Of one step."""
    rng = np.random.default_rng(draw)
    tokens = np.zeros((MICRO_BATCHES, recorded.num_layers, recorded.num_experts, RANKS), np.int32)
    for rank in range(RANKS):
        drawn = rng.choice(recorded.num_sequences, SEQUENCES)
        lengths = recorded.length_of_sequence[drawn]
        own = SequenceLoad(tokens_SLE=np.ascontiguousarray(recorded.tokens_SLE[drawn]), length_of_sequence=lengths)
        parts = partition((DENSE_COST * lengths + lengths**2).tolist(), MICRO_BATCHES, equal_size=False)
        if spread:
            parts = spread_partitions(own, CLUSTER, parts, max(int(lengths[part].sum()) for part in parts))
        for micro_batch, part in enumerate(parts):
            tokens[micro_batch, :, :, rank] = own.tokens_SLE[part].sum(axis=0)
    return StepLoad(tokens_MLER=tokens)


def figure(load: StepLoad, spare_slots: int) -> float:
    """Slowest over mean rank, with as many copies as slots allow."""
    plan = plan_step(load, cluster=CLUSTER, spare_slots=spare_slots, standing_slots=0, max_moves_per_layer=0)
    return float(imbalance(plan.rank_load(load)).mean())


def main() -> None:
    """Print the table."""
    absent.import_verl()
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions  # noqa: PLC0415

    folder = Path(os.environ.get("EQUILIBRA_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
    lines = [
        "# Sequences spread over micro-batches, beside planned copies",
        "",
        f"Slowest over mean rank, mean of {DRAWS} draws; counted, not run.",
        f"{datetime.now(UTC):%Y-%m-%d}, made by `python -m benchmarks.verl_micro_batches`.",
        "",
        "| routing | micro-batches | no copies | 1 spare slot | 2 spare slots |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.npz")):
        recorded = sequence_loads(load_trace(path))
        for how in (False, True):
            loads = [load_of(recorded, draw, get_seqlen_balanced_partitions, spread=how) for draw in range(DRAWS)]
            cells = [f"{np.mean([figure(load, slots) for load in loads]):.4f}" for slots in (0, 1, 2)]
            lines.append(f"| {path.stem} | {'spread' if how else 'verl'} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1], "verl_micro_batches.md").write_text(text)


if __name__ == "__main__":
    main()
