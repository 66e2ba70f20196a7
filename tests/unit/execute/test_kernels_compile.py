"""The products compiled for Hopper, which needs no GPU: they fit, and their loops fetch ahead.

Whether Triton overlaps fetching with computing shows in no result, only in the code it makes: a loop that waits for
memory at every tile has another loop inside, one that waits in every step carries nothing of what comes later.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from equilibra.execute.kernels import grouped, products

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
"""of a block, at most"""
ROWS = ("x", "h", "a", "dy", "dh", "dx", "rows_NK", "into")
ADDRESSES = ("weights", "biases", "down_sums", "gate_up_sums")
TABLES = ("places", "bias_places", "down_places", "gate_up_places", "tiles", "offsets", "work", "shares")
COMMON = {"PRECISION": "tf32", "BM": grouped.BM}


def compiled(kernel, tile, constants):
    """The code of a kernel for rows in bf16."""
    kinds = dict.fromkeys(ROWS, "*bf16") | dict.fromkeys(ADDRESSES, "i64") | dict.fromkeys(TABLES, "*i32")
    kinds |= {"like": "*bf16", "sums_like": "*fp32"}
    constants = {**COMMON, "BN": tile.bn, "BK": tile.bk, **constants}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in ROWS}
    source = ASTSource(
        fn=kernel, signature=signature, attrs=aligned,
        constexprs={(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants},
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=HOPPER, options=options)


def loops_of(code):
    """Of each loop: how many loops it is inside of, and how many values one step hands to the next."""
    found, around = [], []
    for line in code.asm["ttgir"].splitlines():
        depth = len(line) - len(line.lstrip())
        if line.lstrip().startswith("}") and around and depth == around[-1]:
            around.pop()
        if "scf.for" in line:
            found.append((len(around), line.partition("iter_args(")[2].partition(")")[0].count("=")))
            around.append(depth)
    return found


CASES = {
    "first": (products.first_product, grouped.FIRST,
              {"D": 2048, "F": 768, "BIAS": False, "KEEP": True, "CLAMPED": False, "NUM": 132}),
    "down": (products.product, grouped.PRODUCT,
             {"K": 768, "C": 2048, "TRANSPOSED": True, "BIAS": True, "STAGES": grouped.PRODUCT.stages, "NUM": 132}),
    "inner": (products.product, grouped.PRODUCT,
              {"K": 2048, "C": 768, "TRANSPOSED": False, "BIAS": False, "STAGES": grouped.PRODUCT.stages, "NUM": 132}),
    "gradients": (products.gradients, grouped.WEIGHT,
                  {"D": 2048, "F": 768, "IN_MEMORY": True, "DX_BK": grouped.DX.bk, "DX_STAGES": grouped.DX.stages}),
}  # fmt: skip


def fetches_ahead(code):
    """Whether no loop is inside another, and each hands on where the tiles are that come some steps later."""
    outer, carried = zip(*loops_of(code), strict=True)
    return max(outer) == 0 and min(carried) >= 15


@pytest.mark.parametrize("name", CASES)
def test_a_product_fits_and_fetches_ahead(name):
    code = compiled(*CASES[name])
    assert code.metadata.shared <= SHARED_MEMORY
    assert len(loops_of(code)) == (5 if name == "gradients" else 1)
    assert fetches_ahead(code)


def test_a_loop_that_waits_in_every_step_is_noticed():
    kernel, tile, constants = CASES["gradients"]
    assert not fetches_ahead(compiled(kernel, replace(tile, stages=1), constants | {"DX_STAGES": 1}))
