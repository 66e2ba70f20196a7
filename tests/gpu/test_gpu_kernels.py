"""Halves of tiles: rows have the bits that whole tiles give them."""

import pytest
import torch

from equilibra.execute.kernels import ExpertParts, grouped

DEVICE = torch.device("cuda")


@pytest.mark.parametrize(("width", "inner", "sizes"), [(2056, 2000, (500, 0, 1000, 501)), (2880, 2880, (9728, 6784))])
def test_rows_computed_in_halves_of_tiles_have_the_same_bits(width, inner, sizes, monkeypatch):
    monkeypatch.setattr(grouped, "HALF_COST", 0.1)  # halves are chosen whatever the number of multiprocessors
    grouped._shared_out.cache_clear()
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    num_rows = sum(sizes)
    groups = grouped.Groups.of(sizes, DEVICE)
    instances = [ExpertParts(random(2 * inner, width) * 0.02, random(width, inner) * 0.02) for _ in sizes]
    sums = [ExpertParts(*(torch.zeros_like(part, dtype=torch.float32) for part in parts[:2])) for parts in instances]
    dy, a, dh, x = (
        random(num_rows, width),
        random(num_rows, inner),
        random(num_rows, 2 * inner),
        random(num_rows, width),
    )
    launches = grouped.Shares.of(grouped._share_task(groups, dy, inner, learned=(True, True)), DEVICE)
    assert sum(int(launch.shares.view(-1, 10)[:, 9].sum()) for launch in launches) > 0
    dx, whole = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    grouped.weights_and_rows(launches, groups, (dy, a, dh, x), instances, sums, slice(0, len(sizes)), dx)
    grouped.product(groups, dh, instances, "gate_up", whole, transposed=False)
    assert torch.equal(dx, whole)
    for instance, (first, size) in enumerate(zip(groups.offsets.tolist(), sizes, strict=False)):
        of = slice(first, first + size)
        for found, left, right in ((sums[instance].down, dy, a), (sums[instance].gate_up, dh, x)):
            wanted = left[of].float().T @ right[of].float()
            assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()
