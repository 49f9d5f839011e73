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

    assert len(commands) == 10
    for module, options in commands:
        source = (FOLDER / f"demo_training/{module}.py").read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z]+", options):
            assert f'"{option}"' in source, (module, option)


def test_the_package_declares_what_it_imports():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[a-z0-9-]+", text)[0] for text in project["dependencies"]}
    sources = "\n".join(path.read_text() for path in FOLDER.glob("demo_training/*.py"))
    imported = set(
        re.findall(
            r"^(?:from|import) (jinja2|numpy|safetensors|tokenizers|torch)\b", sources, re.MULTILINE
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


def test_the_template_in_use_renders_what_the_model_was_trained_on():
    from demo_training import tool_tasks
    from demo_training.template import render
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "kvd/demo")
    tasks = tool_tasks.Tasks(random.Random(1))
    for _ in range(60):
        task = tasks.draw()
        for thinks in (False, True):
            text = tokenizer.apply_chat_template(
                task.messages,
                tools=task.tools or None,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinks,
            )
            assert text == render(task.messages, task.tools, prompt=True, thinks=thinks)


def test_training_never_shows_a_held_out_function():
    from demo_training import tool_tasks
    from demo_training.words import NOUNS, VERBS

    held_out = {
        (verb, noun)
        for i, verb in enumerate(VERBS)
        for j, noun in enumerate(NOUNS)
        if tool_tasks.is_held_out(i, j)
    }
    names = {
        tool["function"]["name"]
        for tasks in [tool_tasks.Tasks(random.Random(2))]
        for _ in range(300)
        for tool in tasks.draw().tools
    }
    for verb, noun in held_out:
        forms = {f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{noun}.{verb}"}
        assert not names & (forms - set(tool_tasks.COMMON)), (verb, noun)


def test_every_argument_is_said_in_the_request():
    from demo_training import tool_tasks

    tasks = tool_tasks.Tasks(random.Random(3), held_out=True)
    for _ in range(200):
        *_, request, answer = tasks.call().messages
        for call in answer["tool_calls"]:
            for value in call["arguments"].values():
                parts = value if isinstance(value, list) else [value]
                assert all(str(part).lower() in request["content"].lower() for part in parts)
