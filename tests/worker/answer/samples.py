"""Answers in each form, and what they contain."""

from __future__ import annotations

import dataclasses
import re

from kvd.worker.answer import forms
from kvd.worker.answer.forms import AnswerForms


@dataclasses.dataclass(frozen=True)
class Sample:
    forms: AnswerForms
    text: str
    parts: list
    """``(kind, text)``, or ``("call", name, arguments)``."""
    extra: tuple = ()
    """Further special tokens."""


PARIS = ("call", "get_weather", {"city": "Paris", "days": 2})
ROME = ("call", "get_weather", {"city": "Rome"})
_P = '{"city": "Paris", "days": 2}'
_R = '{"city": "Rome"}'


def _of(call, reasoning=forms.THINK):
    return AnswerForms(reasoning, call)


def _wide(text):
    """Return a text with DeepSeek's wide bars for ``%`` and its spaces for ``_`` in markers."""
    marked = re.sub("<%[^>]*%>", lambda found: found[0].replace("_", "\u2581"), text)
    return marked.replace("%", "\uff5c")


SAMPLES = {
    "qwen": Sample(
        _of(forms.QWEN),
        "<think>\nHm, two.\n</think>\n\nI look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_R}}}\n</tool_call>',
        [("reasoning", "Hm, two."), ("text", "I look."), PARIS, ROME],
    ),
    "qwen text after": Sample(
        _of(forms.QWEN),
        f'<tool_call>{{"arguments": {_R}, "name": "get_weather"}}</tool_call>\nDone. ',
        [ROME, ("text", "Done. ")],
    ),
    "arguments as a string": Sample(
        _of(forms.QWEN),
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        [ROME],
    ),
    "no arguments": Sample(
        _of(forms.QWEN),
        '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
        [("call", "get_weather", {})],
    ),
    "qwen coder": Sample(
        _of(forms.QWEN_CODER),
        "<think>a</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        [("reasoning", "a"), PARIS, ROME],
    ),
    "glm": Sample(
        _of(forms.GLM),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        [PARIS, ROME],
    ),
    "minimax": Sample(
        _of(forms.MINIMAX),
        'Yes.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">'
        '\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        [("text", "Yes."), PARIS, ROME],
    ),
    "mistral": Sample(
        _of(forms.MISTRAL, None),
        f"Yes.[TOOL_CALLS]get_weather[ARGS]{_P}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_R}",
        [("text", "Yes."), PARIS, ROME],
        ("[ARGS]", "[CALL_ID]"),
    ),
    "mistral list": Sample(
        _of(forms.MISTRAL_LIST, None),
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_P}, "id": "a"}},'
        f' {{"name": "get_weather", "arguments": {_R}}}]',
        [PARIS, ROME],
    ),
    "kimi": Sample(
        _of(forms.KIMI),
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_P}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1"
        f"<|tool_call_argument_begin|>{_R}<|tool_call_end|><|tool_calls_section_end|>",
        [("text", "I look."), PARIS, ROME],
        ("<|tool_call_argument_begin|>",),
    ),
    "llama": Sample(
        _of(forms.LLAMA, None),
        f'{{"name": "get_weather", "parameters": {_P}}}; {{"type": "function", "name":'
        f' "get_weather", "parameters": {_R}}}',
        [PARIS, ROME],
    ),
    "llama tabs": Sample(
        _of(forms.LLAMA, None),
        f'{{"name": "get_weather", "parameters": {_P}}}\t;\r\n\t{{"name": "get_weather",'
        f' "parameters": {_R}}}',
        [PARIS, ROME],
    ),
    "llama json": Sample(
        _of(forms.LLAMA, None), '{"city": "Paris"}', [("text", '{"city": "Paris"}')]
    ),
    "granite": Sample(
        _of(forms.GRANITE, None),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_P}}}]',
        [PARIS],
    ),
    "seed": Sample(
        _of(forms.SEED, forms.REASONING[4]),
        "<seed:think>Hm.</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome"
        "</parameter>\n</function>\n</seed:tool_call>",
        [("reasoning", "Hm."), ("text", "I look."), PARIS, ROME],
    ),
    "dsml": Sample(
        _of(forms.DEEPSEEK_V32),
        _wide(
            'Yes.\n\n<%DSML%function_calls>\n<%DSML%invoke name="get_weather">\n'
            '<%DSML%parameter name="city" string="true">Paris</%DSML%parameter>\n'
            '<%DSML%parameter name="days" string="false">2</%DSML%parameter>\n</%DSML%invoke>\n'
            '<%DSML%invoke name="get_weather">\n<%DSML%parameter name="city" string="true">Rome'
            "</%DSML%parameter>\n</%DSML%invoke>\n</%DSML%function_calls>"
        ),
        [("text", "Yes."), PARIS, ROME],
    ),
    "deepseek r1": Sample(
        _of(forms.DEEPSEEK_R1),
        _wide(
            "I look.<%tool_calls_begin%>"
            "<%tool_call_begin%>function<%tool_sep%>get_weather\n```json\n"
            f"{_P}\n```<%tool_call_end%>\n"
            "<%tool_call_begin%>function<%tool_sep%>get_weather\n```json\n"
            f"{_R}\n```<%tool_call_end%><%tool_calls_end%>"
        ),
        [("text", "I look."), PARIS, ROME],
        (_wide("<%tool_sep%>"),),
    ),
    "cohere": Sample(
        _of(forms.COHERE, forms.REASONING[5]),
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0",'
        f' "tool_name": "get_weather", "parameters": {_P}}},\n    {{"tool_call_id": "1",'
        f' "tool_name": "get_weather", "parameters": {_R}}}\n]<|END_ACTION|>',
        [("reasoning", "Hm."), PARIS, ROME],
    ),
    "nemotron": Sample(
        _of(forms.NEMOTRON),
        f'<think>a</think>\n<TOOLCALL>[{{"name": "get_weather", "arguments": {_P}}}]</TOOLCALL>',
        [("reasoning", "a"), PARIS],
    ),
    "apriel": Sample(
        _of(forms.APRIEL, None),
        f'I look.\n<tool_calls>[{{"name": "get_weather", "arguments": {_P}, "id": "a"}},'
        f' {{"name": "get_weather", "arguments": {_R}}}]</tool_calls>',
        [("text", "I look."), PARIS, ROME],
    ),
    "minimax m1": Sample(
        _of(forms.MINIMAX_M1),
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {_P}}}\n{{"name": "get_weather",'
        f' "arguments": {_R}}}\n</tool_calls>',
        [PARIS, ROME],
    ),
    "functionary": Sample(
        _of(forms.FUNCTIONARY, None),
        f"I look.<function=get_weather>{_P}</function><function=get_weather>{_R}</function>",
        [("text", "I look."), PARIS, ROME],
    ),
    "pythonic": Sample(
        _of(forms.PYTHONIC, None),
        '<|tool_call_start|>[get_weather(city="Paris", days=2), get_weather(city="Rome")]'
        "<|tool_call_end|>Wait.",
        [PARIS, ROME, ("text", "Wait.")],
    ),
    "gemma": Sample(
        _of(forms.GEMMA, forms.REASONING[8]),
        '<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}'
        "<tool_call|>",
        [("reasoning", "Hm."), PARIS],
        ('<|"|>',),
    ),
    "xtml": Sample(
        _of(forms.KIMI_K3, None),
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument'
        ' key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        [ROME],
    ),
    "harmony": Sample(
        AnswerForms(harmony=forms.HARMONY),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I"
        " look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_P}<|call|>",
        [("reasoning", "Hm."), ("text", "I look."), PARIS],
    ),
    "harmony recipient first": Sample(
        AnswerForms(harmony=forms.HARMONY),
        f"<|start|>assistant to=functions.get_weather<|channel|>analysis<|message|>{_R}<|call|>",
        [ROME],
    ),
    "harmony text": Sample(
        AnswerForms(harmony=forms.HARMONY),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.\n",
        [("reasoning", "Hm."), ("text", "Hi.\n")],
    ),
    "text": Sample(_of(forms.QWEN), "  A\n\nb \n", [("text", "  A\n\nb \n")]),
    "only reasoning": Sample(_of(forms.QWEN), "<think>\nabc", [("reasoning", "abc")]),
    "empty reasoning": Sample(_of(None), "<think>\n\n</think>\n\nHi", [("text", "Hi")]),
}  # fmt: skip
