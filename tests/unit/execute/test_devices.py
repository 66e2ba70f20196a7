"""Nothing that runs on a GPU relies on the device that is current: a model may be on another one."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src" / "equilibra"
FOLDERS = ("execute", "integrations", "rl", "train")
NEED_A_DEVICE = {"current_stream", "synchronize", "Stream", "default_stream", "memory_allocated", "mem_get_info"}
"""functions of torch.cuda that take the current device where none is given"""


def name_of(node: ast.expr) -> str:
    return ast.unparse(node)


def found_in(text: str, *, kernels: bool = True) -> list[str]:
    """Calls that use the device that is current; kernels: whether launches are looked for."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called, given = name_of(node.func), len(node.args) + len(node.keywords)
        if called.startswith("torch.cuda.") and called.rpartition(".")[2] in NEED_A_DEVICE and not given:
            found.append(called)
        if called.endswith(".record") and not given:
            found.append(called)
        devices = [part.value for part in node.keywords if part.arg == "device"]
        devices += [part for part in node.args if called.endswith((".to", "torch.device")) and len(node.args) == 1]
        found += [called for part in devices if isinstance(part, ast.Constant) and part.value == "cuda"]
        if kernels and isinstance(node.func, ast.Subscript):  # kernel[grid](...)
            found.append(called)
    return found


def test_the_device_is_always_named():
    for folder in FOLDERS:
        for file in sorted((SOURCE / folder).rglob("*.py")):
            expected = ["kernel[grid]"] if file == SOURCE / "execute" / "kernels" / "__init__.py" else []
            assert found_in(file.read_text(), kernels=file.parent.name == "kernels") == expected, file


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.current_stream().synchronize()", "torch.cuda.synchronize()", "torch.cuda.Stream()",
        "event.record()", "torch.empty(1, device='cuda')", "x.to('cuda')", "_sum[(n,)](x)",
    ],
)  # fmt: skip
def test_calls_without_a_device_are_found(text):
    assert found_in(text) != []


def test_kernels_are_launched_on_the_device_of_their_tensor(monkeypatch):
    import torch

    from equilibra.execute.kernels import launch

    entered = []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor)

        def __exit__(self, *_):
            entered.append(None)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: entered.append((grid, arguments, constants))

    like = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    launch(Kernel(), (3,), like, 5, NUM=7)
    assert entered == [like, ((3,), (5,), {"NUM": 7}), None]
