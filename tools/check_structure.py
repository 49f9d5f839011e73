"""Fails if a module, class or function is too long, or if modules import each other in a cycle.

``python -m tools.check_structure`` reads the three packages. `EXCEPTIONS` lists what may be longer,
with the reason; an entry that is no longer needed is reported as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

PACKAGES = ("protocol", "actors", "kvd")
MAX_MODULE_LINES = 500
MAX_CLASS_METHODS = 35
MAX_FUNCTION_LINES = 60
MAX_LOOSE_MODULES = {"kvd": 2, "kvd/worker": 5}
"""Limit of modules, except ``__init__``, that are directly in a package with subpackages."""

EXCEPTIONS: dict[str, str] = {}
"""``path``, ``path:Class`` or ``path:function``, and the reason why it may be longer."""


def oversized(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is too long in a module: the key for `EXCEPTIONS`, and the finding."""
    source = path.read_text(encoding="utf-8")
    if (lines := source.count("\n")) > MAX_MODULE_LINES:
        yield str(path), f"{lines} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            methods = sum(isinstance(item, functions) for item in node.body)
            if methods > MAX_CLASS_METHODS:
                yield f"{path}:{node.name}", f"{methods} methods, at most {MAX_CLASS_METHODS}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.name}", f"{lines} lines, at most {MAX_FUNCTION_LINES}"


def crowded() -> Iterator[tuple[str, str]]:
    """Yield packages with too many modules besides their subpackages."""
    for name, most in MAX_LOOSE_MODULES.items():
        loose = [file for file in Path(name).glob("*.py") if file.name != "__init__.py"]
        if len(loose) > most:
            yield name, f"{len(loose)} modules besides subpackages, at most {most}"


def cycles(package: str) -> list[list[str]]:
    """Return groups of modules that import each other, also for type checking only."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while True:  # drop modules that import no remaining module, or that none of those imports
        imported = set().union(*imports.values()) if imports else set()
        rest = {name: imports[name] & imports.keys() for name in imports if name in imported}
        rest = {name: needs & rest.keys() for name, needs in rest.items() if needs & rest.keys()}
        if rest == imports:
            break
        imports = rest
    groups: list[list[str]] = []
    for name in sorted(imports):
        reached = _reach(imports, name)
        group = sorted(other for other in reached if name in _reach(imports, other))
        if len(group) > 1 and group not in groups:
            groups.append(group)
    return groups


def _reach(imports: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that ``start`` imports, directly or indirectly."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imports[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = dict(crowded())
    for package in PACKAGES:
        for path in sorted(Path(package).rglob("*.py")):
            found |= dict(oversized(path))
    lines = [f"{name}: {text}" for name, text in found.items() if name not in EXCEPTIONS]
    lines += [f"{name}: no longer needs an exception" for name in EXCEPTIONS if name not in found]
    lines += [f"import cycle: {', '.join(group)}" for name in PACKAGES for group in cycles(name)]
    print("\n".join(lines) if lines else "structure: within all limits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
