"""The wording check finds an example of each of its rules, and nothing in plain sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_wording import MAX_WORDS, check


def advice(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [hit.advice.partition(":")[0] for hit in check(path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '"""Nobody reads this page before the flush."""',
            ["name the subject, code is not a person"],
        ),
        ("# The worker is told to wait.\nx = 1", ["say what happens"]),
        ('"""All rows but for the first."""', ["use standard word order and current words"]),
        ('"""Of the last step."""', ["start with a noun phrase or a verb"]),
        ('"""A row turns a page."""', ["use the term in docs/glossary.md"]),
        ("open_wish = 1", ["private word in a name"]),
        ("class ParkedRow: pass", ["private word in a name"]),
        ('"""' + "word " * (MAX_WORDS + 1) + '."""', [f"{MAX_WORDS + 1} words in one sentence"]),
    ],
)
def test_each_rule_finds_its_example(tmp_path, text, found):
    assert advice(tmp_path, "module.py", text + "\n") == found


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the pages of a row, oldest first."""',
        "struct = dict(frozen=True)",
        '"""Call `seat.wish` of another library."""',
        "name = 'a parked car'",
    ],
)
def test_plain_sentences_and_python_s_own_words_pass(tmp_path, text):
    assert advice(tmp_path, "module.py", text + "\n") == []


def test_code_tables_and_headings_of_a_page_are_not_prose(tmp_path):
    page = (
        "# Of pages\n\n| Of | nobody |\n\n```\nnobody is told\n```\n\nThe `nobody` user owns it.\n"
    )

    assert advice(tmp_path, "page.md", page) == []


def test_a_hit_names_its_line(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("A line.\nThen nobody reads it.\n")

    (hit,) = check(path)

    assert (hit.line, hit.text) == (2, "Then nobody reads it.")
