"""The check of structure finds oversized definitions and import cycles."""

from __future__ import annotations

import sys
from pathlib import Path

from tools import check_structure


def test_sizes_are_found_with_their_limits(tmp_path):
    path = tmp_path / "module.py"
    body = "\n".join(f"    def f{number}(self): ..." for number in range(36))
    path.write_text(f"class Wide:\n{body}\n\n\ndef long():\n" + "    x = 1\n" * 60 + "\n" * 500)

    found = dict(check_structure.oversized(path))

    assert found[f"{path}:Wide"] == "36 methods, at most 35"
    assert found[f"{path}:long"] == "61 lines, at most 60"
    assert found[str(path)].endswith("lines, at most 500")


def test_import_cycles_are_found_also_under_type_checking(tmp_path, monkeypatch):
    package = tmp_path / "circle_of_two"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("from circle_of_two import second, leaf\n")
    checked = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circle_of_two import first\n"
    )
    (package / "second.py").write_text(checked)
    (package / "leaf.py").touch()
    (package / "root.py").write_text("from circle_of_two import first\n")
    monkeypatch.syspath_prepend(tmp_path)

    found = check_structure.cycles("circle_of_two")

    assert found == [["circle_of_two.first", "circle_of_two.second"]]
    assert "circle_of_two" not in sys.modules


def test_too_many_loose_modules_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kvd/worker").mkdir(parents=True)
    for number in range(6):
        (Path("kvd/worker") / f"m{number}.py").touch()

    assert dict(check_structure.crowded()) == {
        "kvd/worker": "6 modules besides subpackages, at most 5"
    }
