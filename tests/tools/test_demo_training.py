"""The package that trains the embedded model: the commands in its README exist, its dependencies
are declared, and its conversations alternate between user and assistant."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.pages import ROOT

FOLDER = ROOT / "tools/demo_model"


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(FOLDER)
    return


def test_every_command_of_its_readme_is_a_module_with_these_options():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m demo_training\.(\w+) (.*(?:\\\n.*)?)", page)

    assert len(commands) == 6
    for module, options in commands:
        source = (FOLDER / f"demo_training/{module}.py").read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z]+", options):
            assert f'"{option}"' in source, (module, option)


def test_the_package_declares_what_it_imports():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[a-z-]+", text)[0] for text in project["dependencies"]}
    sources = "\n".join(path.read_text() for path in FOLDER.glob("demo_training/*.py"))
    imported = set(
        re.findall(
            r"^(?:from|import) (numpy|safetensors|tokenizers|torch)\b", sources, re.MULTILINE
        )
    )

    assert declared == {"mlx-kvd", *imported}


def test_conversations_alternate_between_user_and_assistant():
    from demo_training import chat

    rng = random.Random(1)
    for _ in range(50):
        roles = [role for role, _ in chat.dialogue(rng, ["The sky is blue. It is wide."] * 20)]
        messages = [role for role in roles if role != "system"]
        assert messages[::2] == ["user"] * len(messages[::2])
        assert messages[1::2] == ["assistant"] * len(messages[1::2])
