"""The example that EPLB's README publishes: github.com/deepseek-ai/EPLB, "Interface and Example"."""

import numpy as np

from equilibra.plan.baselines import eplb_replicas

WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
EXPERT_OF_REPLICA = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_published_example() -> None:
    found = eplb_replicas(WEIGHT, num_replicas=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert found.tolist() == EXPERT_OF_REPLICA


def test_groups_that_do_not_divide_over_nodes_use_the_global_variant() -> None:
    """The cluster counts as one node: replicas of an expert may be on both nodes, which the example forbids."""
    globally = eplb_replicas(WEIGHT, num_replicas=16, num_groups=3, num_nodes=2, num_ranks=8)
    one_node = eplb_replicas(WEIGHT, num_replicas=16, num_groups=1, num_nodes=1, num_ranks=8)
    np.testing.assert_array_equal(globally, one_node)
    assert globally.tolist() != EXPERT_OF_REPLICA
