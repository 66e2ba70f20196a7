"""Lists of upstream names that the integrations use (`upstream/*.toml`), and whether sources have them.

Sources are parsed, never imported: they need GPUs and Ray. They are an installed package, and whatever lies in the
folder that EQUILIBRA_UPSTREAM names: wheels (`pip download --no-deps sglang==0.5.23`) and folders such as `slime`.
"""

import ast
import importlib.util
import os
import tomllib
import zipfile
from pathlib import Path

PACKAGES = ("vllm", "sglang", "slime", "nemo_rl")


def listed(package):
    """The list of a package."""
    return tomllib.loads((Path(__file__).parent / "upstream" / f"{package}.toml").read_text(encoding="utf-8"))


def sources(package):
    """(where, root) of all sources of a package that are at hand."""
    found = importlib.util.find_spec(package)
    roots = [(str(place), Path(place)) for place in (found.submodule_search_locations or ()) if found] if found else []
    folder = os.environ.get("EQUILIBRA_UPSTREAM")
    for entry in sorted(Path(folder).iterdir()) if folder else ():
        if entry.suffix == ".whl" and entry.name.replace("-", "_").split("_")[0] == package:
            roots.append((str(entry), zipfile.Path(entry) / package))
        elif entry.is_dir() and entry.name == package:
            roots.append((str(entry), entry))
    return roots


def missing(root, names):
    """What the sources in this folder do not have of a list."""
    wrong = []
    for place, wanted in (*names["fields"].items(), *names["parameters"].items()):
        files, _, path = place.rpartition(" ")
        node = _node(root, files, path)
        if node is None:
            wrong.append(f"{files} has no {path}")
        elif isinstance(node, ast.ClassDef):
            wrong += [f"{path} of {files} has no field {name}" for name in wanted if name not in _fields(node)]
        elif (found := _parameters(node))[: len(wanted)] != wanted:
            wrong.append(f"{path} of {files} takes {found}, not {wanted}")
    for file, texts in names["texts"].items():
        content = _read(root, file)
        wrong += [f"{file} does not say {text}" for text in texts if text not in content]
    return wrong


def _read(root, file):
    path = root
    for part in file.split("/"):
        path = path / part
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _node(root, files, path):
    """A class or a function, by its dotted path, in the first of these files that has it."""
    for file in files.split(" | "):
        body, node = ast.parse(_read(root, file)).body, None
        for part in path.split("."):
            node = next((one for one in body if getattr(one, "name", None) == part), None)
            body = node.body if node else []
        if node:
            return node
    return None


def _fields(node):
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}


def _parameters(node):
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
