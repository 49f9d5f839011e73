"""Descriptions of the forms of reasoning and calls."""

from __future__ import annotations

import pytest

from kvd.worker.answer import forms
from tests.pages import ROOT


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("user: what is <think> for?\nassistant\n", False),
        ("<think>old</think>answer<|im_start|>assistant\n<think>", True),
    ],
)
def test_the_end_of_a_prompt_may_open_the_reasoning(prompt, opened):
    assert forms.opened_by_prompt(forms.THINK, prompt) is opened


def test_ids_are_given_to_markers_that_are_one_token():
    ids = {"<think>": 7, "<tool_call>": 8}
    known = forms.AnswerForms(forms.THINK, forms.QWEN).with_tokens(ids.get)
    assert known.reasoning == forms.ReasoningForm(
        forms.Marker("<think>", 7), forms.Marker("</think>", None)
    )
    assert known.call.begin.token == 8
    assert known.call.end.token is None
    assert known.call.opening is known.call.begin
    assert known.calls == "json in <tool_call>"


def test_markers_of_a_section_and_of_harmony_get_ids():
    known = forms.AnswerForms(call=forms.KIMI, harmony=forms.HARMONY).with_tokens(len)
    assert known.call.opening == forms.Marker("<|tool_calls_section_begin|>", 28)
    assert known.harmony.call == forms.Marker("<|call|>", 8)
    assert known.calls == "harmony"
    assert known.has_reasoning


def test_the_page_of_models_lists_all_forms():
    page = (ROOT / "docs" / "models.md").read_text().replace("\\|", "|")
    rows = [line for line in page.splitlines() if line.endswith(("arrive |", "whole |"))]
    listed = {line.split("`")[1]: line.endswith("whole |") for line in rows}
    assert listed == {"harmony": False} | {
        form.name: isinstance(form.body, forms.WholeBody) for form in forms.CALLS
    }
    assert all(form.begin.text in page for form in forms.REASONING[:8])
