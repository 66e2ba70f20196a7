"""Balance one layer of one micro-batch: loads in, copies and split out, in microseconds."""

import numpy as np

from equilibra import Cluster, balance

cluster = Cluster(num_nodes=1, ranks_per_node=8)
generator = np.random.default_rng(0)
popularity = 1.0 / np.arange(1, 129)  # Zipf: a few hot experts
load = generator.multinomial(8 * 8192, popularity / popularity.sum())
tokens = generator.multinomial(load, np.full(8, 1 / 8))  # [experts, source ranks]

before = load.reshape(8, 16).sum(axis=1)
after = balance(tokens, cluster=cluster, spare_slots=2)

print(f"imbalance {before.max() / before.mean():.2f} -> {after.imbalance:.4f}, {len(after.rank_of_copy)} copies")
for expert, rank, served in zip(after.expert_of_copy, after.rank_of_copy, after.tokens_FR.sum(axis=1), strict=True):
    print(f"  expert {expert} is copied to rank {rank}, which serves {served} of its {load[expert]} tokens")
