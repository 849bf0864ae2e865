"""Check the list of private names of other libraries in CONTRIBUTING.md against the code.

    python tools/private_names.py

A private name is one with a leading underscore that another package defines: imported, read as an attribute, or
overridden in a class. Each row of the table has a file (that of the row above if empty), the names and the reason. The
check fails where the code uses a name that is not listed, where the list has a name that no code uses, and where a
module of this project imports a private name of another module.
"""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGES = ("hf_vaswani", "training")
SECTION = "## Private names of other libraries"
ATTRIBUTE_FUNCTIONS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    """
    >>> is_private("_name"), is_private("__init__"), is_private("name"), is_private("_")
    (True, False, False, False)
    """
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))


def source_files() -> list[Path]:
    """The Python files of both packages."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def defined_names(tree: ast.AST) -> set[str]:
    """Names that a file itself gives to functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def used_names(tree: ast.AST) -> set[str]:
    """Private names that a file imports from other packages, or reads as attributes of anything."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not is_own(node):
            names.update([*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_FUNCTIONS:
            names.update(word.value for word in node.args if isinstance(word, ast.Constant))
    return {name for name in names if isinstance(name, str) and is_private(name)}


def is_own(node: ast.ImportFrom) -> bool:
    return node.level > 0 or (node.module or "").split(".")[0] in PACKAGES


def imported_across_modules(tree: ast.AST) -> set[str]:
    """Private names that a file imports from another module of this project."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and is_own(node))
    return {alias.name for node in imports for alias in node.names if is_private(alias.name)}


def inherited_names(path: Path, tree: ast.AST) -> set[str]:
    """Private names that the classes of a file have from other packages: overridden, or set on an instance.

    A file whose classes inherit nothing is not imported: it may need packages that are not installed.
    """
    if not any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(tree)):
        return set()
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    names = set()
    for _, own in inspect.getmembers(module, inspect.isclass):
        if own.__module__ == module.__name__:
            foreign = [
                base for base in own.__mro__[1:] if base.__module__.split(".")[0] not in (*PACKAGES, "builtins")
            ]
            for base in foreign:
                names.update(filter(is_private, [*vars(base), *attributes_set_by(base)]))
    return names


@functools.cache
def attributes_set_by(base: type) -> set[str]:
    """Attributes that a class's own code sets on its instances; none where its source is not Python."""
    try:
        source = inspect.getsource(base)
    except (OSError, TypeError):
        return set()
    nodes = ast.walk(ast.parse(textwrap.dedent(source)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def private_names() -> dict[str, set[str]]:
    """By file, the private names of other packages that its code uses."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in source_files()}
    own = set().union(*map(defined_names, trees.values()))
    found = {}
    for path, tree in trees.items():
        inherited = inherited_names(path, tree)
        names = {name for name in used_names(tree) if name not in own or name in inherited}
        names |= {name for name in defined_names(tree) if is_private(name) and name in inherited}
        if names:
            found[str(path.relative_to(ROOT))] = names
    return found


def listed_names(text: str) -> dict[str, set[str]]:
    """By file, the names in the table of CONTRIBUTING.md.

    >>> sorted(listed_names(SECTION + "\\n\\n| `a.py` | `_b`, `_c` | no other way |\\n")["a.py"])
    ['_b', '_c']
    """
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    listed: dict[str, set[str]] = defaultdict(set)
    file = ""
    for first, names in re.findall(r"^\| (?:`([^`|]+)`)? ?\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE):
        file = first or file
        listed[file].update(name.rpartition(".")[2] for name in re.findall(r"`([^`]+)`", names))
    return listed


def main() -> int:
    """Prints what does not fit; 1 if anything."""
    used, listed = private_names(), listed_names((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    wrong = []
    for file in sorted(used.keys() | listed.keys()):
        here, there = used.get(file, set()), listed.get(file, set())
        wrong += [f"{file}: {name} is not in CONTRIBUTING.md" for name in sorted(here - there)]
        wrong += [
            f"{file}: CONTRIBUTING.md lists {name}, which the code does not use" for name in sorted(there - here)
        ]
    for path in source_files():
        names = imported_across_modules(ast.parse(path.read_text(encoding="utf-8")))
        wrong += [f"{path.relative_to(ROOT)}: imports {name}, another module's private name" for name in sorted(names)]
    print("\n".join(wrong) or f"{sum(map(len, used.values()))} private names of other libraries, all listed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
