"""A stand-in for slime's `build_dp_schedule`, written afresh: first-fit in file order, then ranks in turn.

Optimizer steps are runs of `global_batch_size` rollouts; what does not fill one is left out. The largest micro-batch
is cut in two until there is one for every rank in the same number. With `balance_data` micro-batches go to ranks by
their cost, the costliest first to the rank that has least (slime: Karmarkar and Karp's way, to the same end), and run
there in the order in which they were filled.
"""

from __future__ import annotations

from typing import Any

DENSE_COST = 24_576


def build_dp_schedule(
    args: Any, train_parallel_config: dict, total_lengths: list[int], *, global_batch_size: int, rollout_indices: list
) -> tuple:
    ranks = train_parallel_config["dp_size"]
    group = train_parallel_config["microbatch_group_size_per_vp_stage"] if train_parallel_config["vpp_size"] > 1 else 1
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(sample)
    every = list(rollouts.values())
    partitions, indices, counts = [[] for _ in range(ranks)], [[] for _ in range(ranks)], []
    for step in range(len(every) // global_batch_size):
        chosen = every[step * global_batch_size : (step + 1) * global_batch_size]
        bins = _bins(args, train_parallel_config, [s for samples in chosen for s in samples], total_lengths)
        while len(bins) % (ranks * group):
            assert any(len(b) > 1 for b in bins), "too few samples"
            largest = max((b for b in bins if len(b) > 1), key=lambda b: sum(total_lengths[s] for s in b))
            bins.remove(largest)
            bins += [largest[::2], largest[1::2]]
        counts.append(len(bins) // ranks)
        for rank, of_rank in enumerate(_ranks(bins, ranks, total_lengths, balance=args.balance_data)):
            for samples in of_rank:
                indices[rank].append(list(range(len(partitions[rank]), len(partitions[rank]) + len(samples))))
                partitions[rank] += samples
    return partitions, indices, counts, [global_batch_size] * len(counts)


def _bins(args: Any, config: dict, samples: list[int], lengths: list[int]) -> list[list[int]]:
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        return [samples[at : at + size] for at in range(0, len(samples), size)]
    bins: list[list[int]] = []
    for sample in samples:
        room = args.max_tokens_per_gpu * config["cp_size"] - lengths[sample]
        fits = next((b for b in bins if sum(lengths[s] for s in b) <= room), None)
        if fits is None:
            bins.append([sample])
        else:
            fits.append(sample)
    return bins


def _ranks(bins: list[list[int]], ranks: int, lengths: list[int], *, balance: bool) -> list[list[list[int]]]:
    if not balance:
        return [bins[rank::ranks] for rank in range(ranks)]
    found: list[list[list[int]]] = [[] for _ in range(ranks)]
    cost = {id(b): sum(DENSE_COST * lengths[s] + lengths[s] ** 2 for s in b) for b in bins}
    for one in sorted(bins, key=lambda b: -cost[id(b)]):
        open_ranks = [of_rank for of_rank in found if len(of_rank) < len(bins) // ranks]
        min(open_ranks, key=lambda of_rank: sum(cost[id(b)] for b in of_rank)).append(one)
    return [sorted(of_rank, key=bins.index) for of_rank in found]
