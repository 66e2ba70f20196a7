"""Equilibra in one file: balance the experts of an MoE layer without changing what it computes.

In RL the rollout has chosen every token's experts before training starts. So the load of every micro-batch is known
before it runs, and the whole step can be planned ahead. This file does that for one layer, with numpy and torch only:

    read_recording -> cut -> count -> plan_step -> run_rank on four processes -> compare with run_reference

The slowest rank sets the pace, because all ranks meet in the all-to-all. Two kinds of copies level the ranks:
  standing copies   across nodes, fetched once per step: the slow network carries each of them once
  flash copies      inside a node, fetched per micro-batch: a few hot experts in a few spare slots
A copy computes some of its expert's tokens and sends its gradient home. It holds no optimizer state.

Symbols: T tokens, K experts per token, D hidden size, F expert width, E experts, R ranks, N nodes, M micro-batches,
I instances (homes and copies) that compute something in one micro-batch.

    python examples/equilibra_in_one_file.py                                             # synthetic routing
    python examples/equilibra_in_one_file.py --recording routing.npz --layer 3 --nodes 1
    python examples/equilibra_in_one_file.py --drop-a-gradient                           # must fail
"""

import argparse
import sys
import tempfile
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import silu

NUM_RANKS = 4
FLASH_SLOTS = 2  # flash copies that a rank can hold at a time
STANDING_SLOTS = 2  # standing copies that a node keeps for the whole step
TOLERANCE = 0.005  # a rank this little above the mean is level
HIDDEN, WIDTH = 32, 48
MAX_DIFFERENCE = 1e-10  # float64: only the order of sums differs


# ---- 1. Routing: which experts every token goes to ------------------------------------------------------------------
def read_recording(file: Path, layer: int) -> tuple[np.ndarray, np.ndarray, int]:
    """ids_TK of one layer, offsets (sequence s has the tokens offsets[s] to offsets[s + 1] - 1), number of experts."""
    with np.load(file) as data:
        num_experts = int(data["num_experts"]) if "num_experts" in data else int(data["ids"].max()) + 1
        return data["ids"][:, layer].astype(np.int64), data["offsets"], num_experts


def make_recording() -> tuple[np.ndarray, np.ndarray, int]:
    """Skewed routing: some experts are popular everywhere, others in one domain. Sequences come in domain order."""
    num_domains, num_sequences, num_experts, top_k = 6, 48, 32, 4
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], generator.integers(60, 400, num_sequences).cumsum()])
    everywhere, in_domain = (generator.normal(0, 0.7, size) for size in (num_experts, (num_domains, num_experts)))
    domain_of_token = np.repeat(np.arange(num_sequences) * num_domains // num_sequences, np.diff(offsets))
    score_TE = (everywhere + in_domain)[domain_of_token]
    return np.argsort(-(score_TE + generator.gumbel(size=score_TE.shape)), axis=1)[:, :top_k], offsets, num_experts


def cut(offsets: np.ndarray, num_ranks: int, tokens_per_rank: int) -> list[list[np.ndarray]]:
    """Tokens of every (micro-batch, rank): whole sequences in file order, up to a budget."""
    cells: list[list[np.ndarray]] = [[]]
    for start, end in pairwise(offsets):
        if cells[-1] and sum(map(len, cells[-1])) + end - start > tokens_per_rank:
            cells.append([])
        cells[-1].append(np.arange(start, end))
    tokens = [np.concatenate(cell) for cell in cells] + [np.zeros(0, int)] * (-len(cells) % num_ranks)
    return [tokens[first : first + num_ranks] for first in range(0, len(tokens), num_ranks)]


def count(ids_TK: np.ndarray, micro_batches: list[list[np.ndarray]], num_experts: int) -> np.ndarray:
    """tokens_MER: (token, expert) pairs of every expert, by the rank that holds the token."""
    loads = [[np.bincount(ids_TK[rows].ravel(), minlength=num_experts) for rows in ranks] for ranks in micro_batches]
    return np.array(loads).transpose(0, 2, 1)


# ---- 2. The plan: where copies go, and who computes what ------------------------------------------------------------
class Route(NamedTuple):
    """The way of a copy: its weights go from source to target, its gradient goes back."""

    expert: int
    source: int
    target: int


class Visit(NamedTuple):
    """The layer in one micro-batch. Instances are sorted by expert, then rank."""

    expert_of_instance: np.ndarray
    rank_of_instance: np.ndarray
    tokens_IR: np.ndarray  # tokens of each source rank that each instance computes
    flash: list[Route]


class StepPlan(NamedTuple):
    home_of_expert: np.ndarray
    standing: list[Route]
    visits: list[Visit]


def level_nodes(load_ME: np.ndarray, home_node: np.ndarray, holds_EN: np.ndarray) -> np.ndarray:
    """quota_MEN: tokens of every expert that each node computes.

    Two nodes that hold the same expert share its tokens so that their loads meet. A few sweeps settle all nodes.
    """
    quota_MEN = np.zeros((*load_ME.shape, holds_EN.shape[1]), int)
    quota_MEN[:, np.arange(len(home_node)), home_node] = load_ME
    shared = [(e, a, b) for e, holds_N in enumerate(holds_EN) for a, b in combinations(np.flatnonzero(holds_N), 2)]
    for expert, a, b in shared * 20:
        half_M = np.trunc((quota_MEN[:, :, a].sum(1) - quota_MEN[:, :, b].sum(1)) / 2).astype(int)
        move_M = np.clip(half_M, -quota_MEN[:, expert, b], quota_MEN[:, expert, a])
        quota_MEN[:, expert, a] -= move_M
        quota_MEN[:, expert, b] += move_M
    return quota_MEN


def choose_standing(load_ME: np.ndarray, home_node: np.ndarray, num_nodes: int, slots: int) -> np.ndarray:
    """holds_EN: nodes that hold each expert. Add the copy that levels all micro-batches most, again and again.

    The sum of squared node loads says how uneven they are. Moving t tokens down a difference of d lowers it by
    2 t (d - t), which is largest at half the difference.
    """
    home_EN = home_node[:, None] == np.arange(num_nodes)
    holds_EN = home_EN.copy()
    for _ in range(num_nodes * slots):
        quota_MEN = level_nodes(load_ME, home_node, holds_EN)
        load_MN = quota_MEN.sum(1)
        difference_MEN = np.maximum(load_MN[:, home_node, None] - load_MN[:, None, :], 0)
        at_home_ME = quota_MEN[:, np.arange(len(home_node)), home_node]
        moved_MEN = np.minimum(difference_MEN // 2, at_home_ME[:, :, None])
        full_N = (holds_EN & ~home_EN).sum(0) == slots
        gain_EN = (moved_MEN * (difference_MEN - moved_MEN)).sum(0) * ~(holds_EN | full_N)
        if gain_EN.max() == 0 or load_MN.max(1).sum() <= (1 + TOLERANCE / 2) * load_MN.mean(1).sum():
            break
        holds_EN.flat[gain_EN.argmax()] = True
    return holds_EN


def add_flash_copies(quota_ER: np.ndarray, held_ER: np.ndarray, slots: int) -> np.ndarray:
    """Level the ranks of one node: returns quota_ER, the tokens of every expert that each rank computes, with copies.

    The most loaded rank gives tokens of its hottest expert to the least loaded one that can hold it, until one of
    them is at the mean. If no rank with room has a free slot, a third rank takes the tokens and passes on as many of
    another expert, which a rank with room already holds.
    """
    quota_ER, held_ER = quota_ER.copy(), held_ER.copy()
    free_R = np.full(quota_ER.shape[1], slots)
    goal = -(-quota_ER.sum() // len(free_R))  # the mean, rounded up

    def move(expert: int, giver: int, taker: int, tokens: int) -> None:
        free_R[taker] -= not held_ER[expert, taker]
        held_ER[expert, taker] = True
        quota_ER[expert, giver] -= tokens
        quota_ER[expert, taker] += tokens

    while (load_R := quota_ER.sum(0)).max() > (1 + TOLERANCE) * goal:
        hot = load_R.argmax()
        expert = quota_ER[:, hot].argmax()
        wanted = min(load_R[hot] - goal, quota_ER[expert, hot])
        room_R, can_hold_R = goal - load_R, (free_R > 0) | held_ER[expert]
        cold = np.where(can_hold_R, room_R, 0).argmax()
        if can_hold_R[cold] and room_R[cold] > 0:
            move(expert, hot, cold, min(wanted, room_R[cold]))
            continue
        detours = (
            (min(wanted, quota_ER[other, third], room_R[cold]), third, other, cold)
            for cold in np.flatnonzero(room_R > 0)
            for other in np.flatnonzero(held_ER[:, cold])
            for third in np.flatnonzero(can_hold_R)
        )
        tokens, third, other, cold = max(detours, default=(0, 0, 0, 0))
        if tokens == 0:
            break  # out of slots
        move(expert, hot, third, tokens)
        move(other, third, cold, tokens)
    return quota_ER


def split(tokens_ER: np.ndarray, quota_ER: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """tokens_IR: whose tokens every instance computes. First those of its rank, then of its node, then the others."""
    expert_I, rank_I = np.nonzero(quota_ER)
    left_ER, left_I = tokens_ER.copy(), quota_ER[expert_I, rank_I]
    source_R = np.arange(tokens_ER.shape[1])
    tokens_IR = np.zeros((len(expert_I), len(source_R)), int)
    for group in (1, ranks_per_node, len(source_R)):
        for i, source in np.argwhere(source_R // group == rank_I[:, None] // group):
            tokens = min(left_I[i], left_ER[expert_I[i], source])
            tokens_IR[i, source] += tokens
            left_ER[expert_I[i], source] -= tokens
            left_I[i] -= tokens
    assert not left_ER.any(), "every (token, expert) pair is computed exactly once"
    return tokens_IR


def plan_step(tokens_MER: np.ndarray, num_nodes: int, flash_slots: int, standing_slots: int) -> StepPlan:
    """Loads in, plan out. Experts are at home on the ranks in order, equally many on each."""
    _, num_experts, num_ranks = tokens_MER.shape
    group = num_ranks // num_nodes
    load_ME = tokens_MER.sum(2)
    home_of_expert = np.arange(num_experts) * num_ranks // num_experts
    holds_EN = choose_standing(load_ME, home_of_expert // group, num_nodes, standing_slots)
    quota_MEN = level_nodes(load_ME, home_of_expert // group, holds_EN)
    held_ER = home_of_expert[:, None] == np.arange(num_ranks)  # for the whole step
    standing: list[Route] = []
    for expert, node in np.argwhere(holds_EN).tolist():
        if node != home_of_expert[expert] // group:
            rank = node * group + sum(route.target // group == node for route in standing) % group  # in turn
            standing.append(Route(expert, int(home_of_expert[expert]), rank))
            held_ER[expert, rank] = True
    holder_EN = held_ER.reshape(num_experts, num_nodes, group).argmax(2) + np.arange(num_nodes) * group
    visits = []
    for tokens_ER, quota_EN in zip(tokens_MER, quota_MEN, strict=True):
        quota_ER = np.repeat(quota_EN, group, axis=1) * held_ER
        for first in range(0, num_ranks, group):
            ranks = slice(first, first + group)
            quota_ER[:, ranks] = add_flash_copies(quota_ER[:, ranks], held_ER[:, ranks], flash_slots)
        copied = np.argwhere((quota_ER > 0) & ~held_ER).tolist()
        flash = [Route(expert, int(holder_EN[expert, rank // group]), rank) for expert, rank in copied]
        visits.append(Visit(*np.nonzero(quota_ER), split(tokens_ER, quota_ER, group), flash))
    return StepPlan(home_of_expert, standing, visits)


def imbalance(plan: StepPlan) -> float:
    """Slowest rank over mean rank, in rows over the whole step; 1.0 is perfect."""
    rows = [np.bincount(v.rank_of_instance, v.tokens_IR.sum(1), v.tokens_IR.shape[1]) for v in plan.visits]
    return np.max(rows, axis=1).sum() / np.mean(rows, axis=1).sum()


# ---- 3. The layer in one process: the reference ---------------------------------------------------------------------
def make_layer(num_tokens: int, num_experts: int) -> list[torch.Tensor]:
    """x_TD, router_ED, and the experts' weights [E, 3, F, D]: one tensor per expert, so that a copy is one message."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, HIDDEN), (num_experts, HIDDEN), (num_experts, 3, WIDTH, HIDDEN)
    x_TD, *weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x_TD, *(weight * HIDDEN**-0.5 for weight in weights)]


def gate(x_TD: torch.Tensor, router_ED: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Router weights of the recorded experts: the choice is replayed, its weights are computed and trained."""
    return (x_TD @ router_ED.T).gather(1, ids_TK).softmax(1)


def run_expert(rows: torch.Tensor, weight_3FD: torch.Tensor) -> torch.Tensor:
    gate_FD, up_FD, down_FD = weight_3FD
    return (silu(rows @ gate_FD.T) * (rows @ up_FD.T)) @ down_FD


def run_reference(ids_TK: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of the whole step: no ranks, no micro-batches, no copies."""
    x_TD, router_ED, weights = (t.requires_grad_() for t in make_layer(len(ids_TK), num_experts))
    gate_TK, out_TD = gate(x_TD, router_ED, ids_TK), torch.zeros_like(x_TD)
    for expert, weight_3FD in enumerate(weights):
        token, k = torch.nonzero(ids_TK == expert, as_tuple=True)
        out_TD = out_TD.index_add(0, token, gate_TK[token, k, None] * run_expert(x_TD[token], weight_3FD))
    loss = (out_TD**2).sum() / len(ids_TK)  # stands for any loss
    loss.backward()
    return {"loss": loss.detach(), "input": x_TD.grad, "router": router_ED.grad, "experts": weights.grad}


# ---- 4. The same layer under the plan, on one of four ranks ---------------------------------------------------------
class Exchange(torch.autograd.Function):
    """All-to-all of rows. Sizes come from the plan: no counts are exchanged first. Gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received) -> torch.Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad) -> tuple:
        sent, received = ctx.sizes
        return Exchange.apply(grad, received, sent), None, None


def transfer(routes: list[Route], tensor_of_expert: dict[int, torch.Tensor]) -> list[tuple[Route, torch.Tensor]]:
    """Send one tensor along every route; returns what arrives here, in the order of the plan."""
    arriving, requests = [], []
    for tag, route in enumerate(routes):
        if route.source == dist.get_rank():
            requests.append(dist.isend(tensor_of_expert[route.expert], route.target, tag=tag))
        elif route.target == dist.get_rank():
            arriving.append((route, torch.empty(3, WIDTH, HIDDEN, dtype=torch.float64)))
            requests.append(dist.irecv(arriving[-1][1], route.source, tag=tag))
    for request in requests:
        request.wait()
    return arriving


def fetch_copies(routes: list[Route], held: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {route.expert: weight.requires_grad_() for route, weight in transfer(routes, held)}


def send_gradients_home(routes: list[Route], held: dict[int, torch.Tensor], lost: Route | None) -> None:
    """A copy's gradient returns to where its weights came from; all are added in the order of the plan."""
    back = [Route(expert, target, source) for expert, source, target in routes if (expert, source, target) != lost]
    for route, grad in transfer(back, {expert: weight.grad for expert, weight in held.items()}):
        held[route.expert].grad += grad


def run_visit(x_TD, gate_TK, ids_TK, visit: Visit, held: dict[int, torch.Tensor]) -> torch.Tensor:
    """The layer's output for the tokens of this rank: dispatch, experts, combine."""
    rank, tokens_IR, rank_of_instance = dist.get_rank(), visit.tokens_IR, visit.rank_of_instance
    # Instances are sorted by expert, so pairs sorted by expert meet theirs in order. Then sort by the rank to send to.
    instance_of_pair = np.repeat(np.arange(len(tokens_IR)), tokens_IR[:, rank])
    pair = np.argsort(ids_TK.numpy().ravel(), kind="stable")
    pair = torch.from_numpy(pair[np.argsort(rank_of_instance[instance_of_pair], kind="stable")])
    token = pair // ids_TK.shape[1]
    mine = np.flatnonzero(rank_of_instance == rank)
    sent = [int(tokens_IR[rank_of_instance == target, rank].sum()) for target in range(dist.get_world_size())]
    received = tokens_IR[mine].sum(0).tolist()
    rows = Exchange.apply(x_TD[token], sent, received)
    # Rows arrive by source, then instance; experts want them by instance.
    instance_of_row = np.concatenate([np.repeat(mine, num_rows) for num_rows in tokens_IR[mine].T])
    order = torch.from_numpy(np.argsort(instance_of_row, kind="stable"))
    parts = rows[order].split(tokens_IR[mine].sum(1).tolist())
    experts = visit.expert_of_instance[mine].tolist()
    done = [run_expert(part, held[expert]) for part, expert in zip(parts, experts, strict=True)]
    rows = Exchange.apply(torch.cat(done or [rows])[order.argsort()], received, sent)
    return torch.zeros_like(x_TD).index_add(0, token, gate_TK.reshape(-1, 1)[pair] * rows)


def run_rank(rank: int, folder: str, plan: StepPlan, micro_batches, ids_TK, lost: Route | None) -> None:
    """One rank's step up to the optimizer. Rank 0 writes the loss and all gradients to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    x_TD, router_ED, weights = make_layer(len(ids_TK), len(plan.home_of_expert))
    x_TD.requires_grad_(), router_ED.requires_grad_()
    home = {e: weights[e].requires_grad_() for e in np.flatnonzero(plan.home_of_expert == rank).tolist()}
    held = home | fetch_copies(plan.standing, home)  # once per step
    for weight in held.values():
        weight.grad = torch.zeros_like(weight)
    loss = torch.zeros((), dtype=torch.float64)
    for visit, tokens_of_rank in zip(plan.visits, micro_batches, strict=True):
        token = torch.from_numpy(tokens_of_rank[rank])
        with_flash = held | fetch_copies(visit.flash, held)  # once per micro-batch
        gate_TK = gate(x_TD[token], router_ED, ids_TK[token])
        out_TD = run_visit(x_TD[token], gate_TK, ids_TK[token], visit, with_flash)
        part = (out_TD**2).sum() / len(ids_TK)
        part.backward()
        loss += part.detach()
        send_gradients_home(visit.flash, with_flash, lost)
    send_gradients_home(plan.standing, held, lost)
    grads = torch.zeros_like(weights)
    for expert, weight in home.items():
        grads[expert] = weight.grad
    result = {"loss": loss, "input": x_TD.grad, "router": router_ED.grad, "experts": grads}
    for tensor in result.values():
        dist.reduce(tensor, 0)
    if rank == 0:
        torch.save(result, f"{folder}/result.pt")
    dist.destroy_process_group()


# ---- 5. Both, and the difference ------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description="Balance one MoE layer, run it on four processes, compare with one.")
    parser.add_argument("--recording", type=Path, help=".npz with ids [tokens, layers, k] and offsets [sequences + 1]")
    parser.add_argument("--layer", type=int, default=0, help="of the recording")
    parser.add_argument("--nodes", type=int, choices=(1, 2, 4), default=2, help="nodes that share the four ranks")
    parser.add_argument("--tokens-per-rank", type=int, default=512, help="budget of a rank in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of the step; the rest of the recording is unused")
    parser.add_argument("--drop-a-gradient", action="store_true", help="lose the gradient of one copy: must fail")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        ids_TK, offsets, num_experts = (
            read_recording(args.recording, args.layer) if args.recording else make_recording()
        )
    except (OSError, ValueError, KeyError, IndexError) as error:
        parser.error(f"cannot read layer {args.layer} of {args.recording}: {error}")
    micro_batches = cut(offsets, NUM_RANKS, args.tokens_per_rank)[: args.micro_batches]
    ids_TK = ids_TK[: sum(len(tokens) for ranks in micro_batches for tokens in ranks)]
    tokens_MER = count(ids_TK, micro_batches, num_experts)
    print(f"{len(ids_TK)} tokens in {len(micro_batches)} micro-batches, {num_experts} experts, {args.nodes} node(s)")
    print(f"{'':18}imbalance  flash copies per micro-batch  standing copies")
    cases = ("static placement", 0, 0), ("flash copies", FLASH_SLOTS, 0), ("and standing", FLASH_SLOTS, STANDING_SLOTS)
    for name, flash_slots, standing_slots in cases:
        plan = plan_step(tokens_MER, args.nodes, flash_slots, standing_slots)
        flash = np.mean([len(visit.flash) for visit in plan.visits])
        print(f"{name:18}{imbalance(plan):9.4f}{flash:30.1f}{len(plan.standing):17}")
    mean_M = tokens_MER.sum((1, 2)) / NUM_RANKS  # rows are whole numbers, so no plan is below the mean rounded up
    print(f"{'lower bound':18}{np.ceil(mean_M).sum() / mean_M.sum():9.4f}\n")
    lost = [*plan.standing, *plan.visits[0].flash][0] if args.drop_a_gradient else None
    ids_TK = torch.from_numpy(ids_TK)
    with tempfile.TemporaryDirectory() as folder:
        told = folder, plan, micro_batches, ids_TK, lost
        torch.multiprocessing.start_processes(run_rank, told, NUM_RANKS, start_method="fork")
        found = torch.load(f"{folder}/result.pt")
    expected = run_reference(ids_TK, num_experts)
    differences = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
    print(f"loss {found['loss']:.9f}; differences from one process:", *(f"{k} {v:.1e}" for k, v in differences.items()))
    same = all(difference <= MAX_DIFFERENCE for difference in differences.values())
    print("loss and gradients are unchanged" if same else f"FAILED: a difference is above {MAX_DIFFERENCE}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
