"""What a model's template can do, and how requests are adapted to it."""

from __future__ import annotations

import pytest

from kvd.worker.answer import forms
from kvd.worker.text import system_notes
from kvd.worker.text.template_messages import TemplateMessages
from kvd.worker.text.text import Text
from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions, Grammar, Tool, ToolCall
from protocol.types import ChatAbilities, ChatMessage, Sampling
from protocol.worker import Submit
from tests.cpu_time import takes_less_than
from tests.worker.text import templates
from tests.worker.text.tokenizers_zoo import byte_level, wrap

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
HARMONY = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end"))
TOOL = Tool(name="find", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
CALL = ChatMessage("assistant", "", tool_calls=[ToolCall("find", '{"n": 3}', "abcdefgh1")])
RESULT = ChatMessage("tool", "it is 4", tool_call_id="abcdefgh1", name="find")
ASKED = ChatMessage("user", "question")


def text_of(template, *added):
    wrapper = wrap(byte_level(*added), template=template)
    return Text(wrapper, vocab_size=2000, context_length=4096, name="the model m")


def rendered(text, messages, **chat):
    return text.template.render(messages, ChatOptions(**chat))


@pytest.mark.parametrize(
    ("template", "added", "form"),
    [
        ("QWEN", MARKERS, forms.QWEN),
        ("CODER", MARKERS, forms.QWEN_CODER),
        ("LLAMA", (), forms.LLAMA),
        ("MISTRAL", ("[TOOL_CALLS]", "[ARGS]"), forms.MISTRAL),
        ("TEXT_ARGUMENTS", MARKERS, forms.QWEN),
    ],
)
def test_the_form_of_calls_is_the_one_that_the_template_shows(template, added, form):
    text = text_of(getattr(templates, template), *added)
    assert text.abilities.tools == form.name
    call = text.split.forms.call
    assert call.body == form.body
    assert (call.begin.token is not None) == (form.begin.text in added)


def test_abilities_of_qwen():
    assert text_of(templates.QWEN, *MARKERS).abilities == ChatAbilities(
        tools="json in <tool_call>",
        tool_results=True,
        reasoning="<think>",
        reasoning_switch=True,
        late_system=True,
    )


def test_abilities_of_llama_and_gemma():
    assert text_of(templates.LLAMA).abilities == ChatAbilities(tools="json", tool_results=True)
    noted = ChatAbilities(tools="json in <tool_call>", tools_noted=True)
    assert text_of(templates.GEMMA).abilities == noted


def test_abilities_of_gpt_oss():
    text = text_of(templates.GPT_OSS, *HARMONY, "<|call|>")
    assert text.abilities == ChatAbilities(
        tools="harmony",
        tool_results=True,
        reasoning="<|channel|>analysis",
        efforts=["low", "medium", "high"],
        late_system=True,
    )


def test_a_model_without_a_template_can_do_nothing():
    assert text_of(None).abilities == ChatAbilities()


@pytest.mark.parametrize(
    ("asked", "used"),
    [("low", "low"), ("high", "xhigh"), ("max", "xhigh"), ("none", "low"), ("extreme", "medium")],
)
def test_an_effort_that_the_template_rejects_is_mapped_to_the_nearest(asked, used):
    text = text_of(templates.STRICT_EFFORT)
    assert text.abilities.efforts == ["low", "medium", "xhigh"]
    assert f"effort {used}" in rendered(text, [ASKED], effort=asked)


def test_an_effort_is_ignored_by_a_template_without_efforts():
    text = text_of(templates.QWEN, *MARKERS)
    assert rendered(text, [ASKED], effort="xhigh") == rendered(text, [ASKED])
    assert rendered(text, [ASKED], effort="none").endswith("</think>\n\n")


def test_reasoning_is_switched_off():
    text = text_of(templates.QWEN, *MARKERS)
    assert rendered(text, [ASKED]).endswith("assistant\n")
    assert rendered(text, [ASKED], reasoning=False).endswith("<think>\n\n</think>\n\n")


def test_reasoning_is_on_if_the_prompt_is_that_of_the_switch():
    on = text_of(templates.QWEN, *MARKERS).template
    condition = "enable_thinking is defined and enable_thinking is false"
    off = text_of(templates.QWEN.replace(condition, "not enable_thinking"), *MARKERS).template
    given = [ChatOptions(), ChatOptions(reasoning=True), ChatOptions(reasoning=False)]
    given.append(ChatOptions(template={"enable_thinking": True}))
    assert [on.may_reason(chat) for chat in given] == [True, True, False, True]
    assert [off.may_reason(chat) for chat in given] == [False, True, False, True]


def test_an_effort_enables_reasoning_that_is_off_by_default():
    condition = "enable_thinking is defined and enable_thinking is false"
    text = text_of(templates.QWEN.replace(condition, "not enable_thinking"), *MARKERS)
    assert not text.abilities.reasons_by_default
    assert rendered(text, [ASKED]).endswith("</think>\n\n")
    assert rendered(text, [ASKED], effort="high").endswith("assistant\n")
    assert rendered(text, [ASKED], effort="none").endswith("</think>\n\n")
    assert rendered(text, [ASKED], effort="high", reasoning=False).endswith("</think>\n\n")
    assert text.template.may_reason(ChatOptions(effort="low"))


def test_calls_and_results_are_rendered():
    text = text_of(templates.CODER, *MARKERS)
    found = rendered(text, [ASKED, CALL, RESULT], tools=[TOOL])
    assert "<function=find>\n<parameter=n>\n3\n</parameter>\n</function>" in found
    assert "it is 4" in found


def test_arguments_are_text_if_the_template_wants_text():
    text = text_of(templates.TEXT_ARGUMENTS, *MARKERS)
    assert '"arguments": {"n": 3}}' in rendered(text, [ASKED, CALL])


def test_arguments_that_were_cut_off_are_rendered():
    text = text_of(templates.CODER, *MARKERS)
    cut = ChatMessage("assistant", "", tool_calls=[ToolCall("find", '{"n": ', "a")])
    assert '{"n": ' in rendered(text, [ASKED, cut, RESULT])


def test_results_are_notes_of_the_user_if_the_template_has_no_tool_role():
    text = text_of(templates.GEMMA)
    answered = ChatMessage("assistant", "I look.")
    assert "Result of find: it is 4" in rendered(text, [ASKED, answered, RESULT])


TOOLS_IN_ANOTHER_FORM = templates.QWEN.replace("<tool_call>", "<call>").replace(
    "</tool_call>", "</call>{# <tool_call> tool_call.name #}"
)
"""mlx-lm would choose its parser of JSON in <tool_call>, and a JSON object is shown, too."""
CALLS = ChatMessage(
    "assistant",
    "I look.",
    tool_calls=[ToolCall("find", '{"n": 3}', "a"), ToolCall("find", "{}", "b")],
)
RESULTS = [ChatMessage("tool", f"result {one}", tool_call_id=one, name="find") for one in "ba"]


@pytest.mark.parametrize("template", ["LLAMA", "GPT_OSS"])
def test_each_call_has_a_message_if_the_template_shows_only_one(template):
    text = text_of(getattr(templates, template), *HARMONY, "<|call|>")
    found = rendered(text, [ASKED, CALLS, *RESULTS, ASKED])
    first, second = found.index('{"n": 3}'), found.index("{}")
    assert first < found.index("result a") < second < found.index("result b")


@pytest.mark.parametrize("ids", ["ab", "aa"])
def test_calls_with_the_same_id_get_their_results_in_order(ids):
    calls = [ToolCall("find", "{}", one) for one in ids]
    results = [ChatMessage("tool", f"result {n}", tool_call_id=ids[n]) for n in range(2)]
    messages = TemplateMessages(single_calls=True)
    found = messages.adapt([ASKED, ChatMessage("assistant", "", tool_calls=calls), *results])
    assert [one.content for one in found] == ["question", "", "result 0", "", "result 1"]
    assert [one.tool_calls for one in found[1::2]] == [[calls[0]], [calls[1]]]


def test_results_of_no_call_and_several_of_one_are_kept():
    names = ["b", "x", "a", "b"]
    results = [ChatMessage("tool", f"{n}{one}", tool_call_id=one) for n, one in enumerate(names)]
    found = TemplateMessages(single_calls=True).adapt([CALLS, *results, ASKED])
    assert [one.content for one in found] == ["I look.", "2a", "", "0b", "3b", "1x", "question"]


def test_many_messages_are_adapted_in_linear_time():
    """It took over 6 s when the results were searched for each message and call."""
    messages = [ASKED, ChatMessage("assistant", "a")] * 40_000
    calls = [ToolCall("find", "{}", str(n)) for n in range(10_000)]
    results = [ChatMessage("tool", "r", tool_call_id=str(n)) for n in range(10_000)]
    messages += [ChatMessage("assistant", "", tool_calls=calls), *results]
    adapt = TemplateMessages(single_calls=True).adapt
    assert takes_less_than(3, lambda: adapt(messages))


def test_a_template_that_refuses_a_call_at_the_end_may_take_several():
    refuses = "{%- if messages[-1].tool_calls %}{{ raise_exception('no end') }}{% endif %}"
    text = text_of(refuses + templates.QWEN, *MARKERS)
    assert text.abilities.tools == forms.QWEN.name
    assert not text.template.messages.single_calls
    assert not text.template.messages.short_ids


def test_a_list_of_tools_after_the_messages_is_not_taken_for_a_call():
    late = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools or '' }}"
    text = text_of(late + "<tool_call></tool_call>", *MARKERS)
    assert not text.template.messages.shows_calls
    assert '{"n": 3}' in rendered(text, [ASKED, CALL, RESULT])


def test_ids_are_shortened_for_a_template_that_wants_short_ones():
    text = text_of(templates.MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    assert text.template.messages.short_ids
    shown = text.template.messages.convert(CALLS)
    (first, second) = (call["id"] for call in shown["tool_calls"])
    assert len({first, second}) == 2
    assert [text.template.messages.convert(one)["tool_call_id"] for one in RESULTS] == [
        second,
        first,
    ]
    assert text.template.messages.convert(RESULT)["tool_call_id"] == RESULT.tool_call_id
    assert '[ARGS]{"n": 3}' in rendered(text, [ASKED, CALLS, *RESULTS])
    assert not text_of(templates.QWEN, *MARKERS).template.messages.short_ids


def test_messages_of_a_role_are_joined_if_the_template_refuses_them():
    text = text_of(templates.GEMMA)
    found = rendered(text, [ASKED, ChatMessage("user", "and?"), CALLS, *RESULTS])
    assert "<start>user\nquestion\n\nand?<end>" in found
    assert "<start>user\nResult of find: result b\n\nResult of find: result a<end>" in found
    assert (
        rendered(text_of(templates.QWEN, *MARKERS), [ASKED, ASKED]).count("<|im_start|>user") == 2
    )


def test_a_blank_answer_stands_between_two_questions_that_roles_separate():
    check = (
        "{%- set plain = rest | rejectattr('role', 'equalto', 'tool')"
        " | selectattr('tool_calls', 'undefined') | list %}{%- for m in plain %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles alternate') }}{% endif %}{% endfor %}"
    )
    loop = "{%- for m in rest %}"
    strict = templates.MISTRAL.replace(loop, check + loop)
    text = text_of(strict, "[TOOL_CALLS]", "[ARGS]")
    found = rendered(text, [ASKED, CALL, RESULT, ChatMessage("user", "stop")])
    assert found.endswith("[TOOL_RESULTS]it is 4[/TOOL_RESULTS] [INST]stop[/INST]")
    with pytest.raises(InvalidRequest, match="roles alternate"):
        rendered(text, [ChatMessage("assistant", "first")])


def test_calls_that_the_template_does_not_show_are_text_in_the_models_form():
    granite = (
        "{{ (tools or []) | tojson }} Call with <|tool_call|> and a list.\n"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    text = text_of(granite, "<|tool_call|>")
    assert text.abilities.tools == forms.GRANITE.name
    assert text.abilities.tool_results
    found = rendered(text, [ASKED, CALL, RESULT], tools=[TOOL])
    assert (
        '<assistant><|tool_call|>[{"name": "find", "arguments": {"n": 3}}]\n<tool>it is 4' in found
    )


def test_a_template_that_cannot_take_calls_gets_them_as_text():
    loop = "{%- for call in m.tool_calls or [] %}"
    refuses = templates.QWEN.replace(loop, loop + "{{ m.append(1) }}")
    text = text_of(refuses, *MARKERS)
    assert "find" in rendered(text, [ASKED, CALL, RESULT])


def test_tools_are_given_under_the_name_that_the_template_uses():
    renamed = templates.QWEN.replace("if tools", "if xml_tools").replace("in tools", "in xml_tools")
    text = text_of(renamed, *MARKERS)
    assert text.abilities.tools == forms.QWEN.name
    assert '"name": "find"' in rendered(text, [ASKED], tools=[TOOL])


def test_a_late_system_message_stays_in_its_place():
    messages = [ASKED, ChatMessage("assistant", "a"), ChatMessage("system", "be brief")]
    for template in (templates.QWEN, templates.LLAMA, templates.MISTRAL, templates.GEMMA):
        text = text_of(template, *MARKERS)
        before = rendered(text, [ASKED])
        found = rendered(text, [*messages, ChatMessage("user", "again")])
        assert found.startswith(before[: before.index("question")])
        assert found.index("question") < found.index("be brief") < found.index("again")


def test_a_late_system_message_leaves_the_prefix_of_the_next_turn_unchanged():
    text = text_of(templates.LLAMA)
    first = [ASKED, ChatMessage("assistant", "a"), ChatMessage("system", "be brief")]
    before = rendered(text, first)
    after = rendered(text, [*first, ChatMessage("user", "again")])
    assert after.startswith(before[: before.index("be brief") + len("be brief")])


def test_a_system_message_is_a_note_where_the_template_has_no_system_role():
    text = text_of(templates.GEMMA)
    found = rendered(text, [ChatMessage("system", "be brief"), ASKED])
    assert "<start>user\nbe brief\n\nquestion<end>" in found


def submit(**fields):
    return Submit(rid="r", sampling=Sampling(), **fields)


@pytest.mark.parametrize(
    "template",
    [
        templates.GEMMA,
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        TOOLS_IN_ANOTHER_FORM,
    ],
)
def test_tools_that_the_template_does_not_list_are_in_the_system_message(template):
    text = text_of(template)
    assert (text.abilities.tools, text.abilities.tools_noted) == (forms.QWEN.name, True)
    chat = {"tools": [TOOL]}
    found = rendered(text, [ChatMessage("system", "be brief"), ASKED, CALLS, *RESULTS], **chat)
    assert "be brief\n\nYou can call the following tools" in found
    assert found.count('"name": "find", "description"') == 1
    assert (
        found.index('{"name": "NAME"')
        < found.index("question")
        < found.index("I look.\n<tool_call>")
    )
    assert found.index("Result of find: result b") < found.index("Result of find: result a")
    assert "You can call" in rendered(text, [ASKED], **chat)
    assert "You can call" not in rendered(text, [ASKED], tool_choice="none", **chat)


def test_a_form_that_cannot_be_written_is_not_asked_for():
    """It is named in a comment; mlx-lm's parser would not read JSON between its markers."""
    text = text_of("{# <|tool_call> <tool_call|> #}" + templates.GEMMA)
    assert text.abilities.tools == forms.QWEN.name
    assert "<tool_call>\n{" in rendered(text, [ASKED], tools=[TOOL])


def test_several_calls_are_offered_only_if_the_request_allows_them():
    text = text_of(templates.GEMMA)
    assert "Several calls" in rendered(text, [ASKED], tools=[TOOL])
    assert "Several calls" not in rendered(text, [ASKED], tools=[TOOL], parallel_tool_calls=False)


def test_a_model_of_harmony_whose_template_lists_no_tools_says_so():
    text = text_of(templates.GEMMA, *HARMONY, "<|call|>")
    with pytest.raises(InvalidRequest, match="its chat template lists no tools"):
        text.encode(submit(messages=[ASKED], chat=ChatOptions(tools=[TOOL])))


def test_results_that_are_shown_only_with_tools_are_notes_of_the_user():
    half = templates.QWEN.replace("m.role == 'tool' %}", "m.role == 'tool' and tools %}")
    text = text_of(half, *MARKERS)
    assert not text.abilities.tool_results
    assert "Result of find: it is 4" in rendered(text, [ASKED, CALL, RESULT])


def test_tools_are_refused_if_the_template_is_too_slow():
    def too_slow(_render):
        raise TimeoutError

    wrapper = wrap(byte_level(*MARKERS), template=templates.QWEN)
    text = Text(wrapper, vocab_size=2000, context_length=100, limit_template=too_slow, name="m")
    with pytest.raises(
        InvalidRequest, match="m cannot call tools: its chat template takes too much"
    ):
        text.encode(submit(messages=[ASKED], chat=ChatOptions(tools=[TOOL])))


def test_template_arguments_reach_the_template_except_those_that_kvd_sets():
    text = text_of("{{ colour }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert rendered(text, [ASKED], template={"colour": "red"}) == "redquestion"
    with pytest.raises(InvalidRequest, match="'chat_template', which kvd sets itself"):
        rendered(text, [ASKED], template={"chat_template": "x"})


def test_reasoning_that_the_prompt_began_is_reasoning():
    text = text_of(templates.CODER, *MARKERS)
    request = submit(messages=[ASKED])
    stream = text.stream(request, text.encode(request))
    answer = text._tokenizer.encode("Hm.</think>\n\nYes", add_special_tokens=False)
    got = "".join(stream.push(token) for token in answer) + stream.finish()
    assert got == "Hm.Yes"
    assert [(part.at, part.kind) for part in stream.take_parts()] == [(0, "reasoning"), (3, "text")]
    assert stream.reasoning_tokens == answer.index(text._tokenizer.get_vocab()["</think>"]) + 1


def test_without_tools_the_markers_of_calls_are_text():
    text = text_of(templates.QWEN, *MARKERS)
    request = submit(messages=[ASKED])
    stream = text.stream(request, text.encode(request))
    answer = text._tokenizer.encode("a <tool_call>{}</tool_call>", add_special_tokens=False)
    got = "".join(stream.push(token) for token in answer) + stream.finish()
    assert got == "a <tool_call>{}</tool_call>"
    assert stream.take_parts() == []


def test_a_call_in_an_answer_of_a_model_has_its_part():
    text = text_of(templates.QWEN, *MARKERS)
    request = submit(messages=[ASKED], chat=ChatOptions(tools=[TOOL]))
    stream = text.stream(request, text.encode(request))
    written = '<tool_call>\n{"name": "find", "arguments": {"n": 3}}\n</tool_call>'
    answer = text._tokenizer.encode(f"I look.\n{written}", add_special_tokens=False)
    got = "".join(stream.push(token) for token in answer) + stream.finish()
    assert got == 'I look.{"n": 3}'
    assert [(part.at, part.kind, part.name) for part in stream.take_parts()] == [
        (7, "call", "find")
    ]


def test_a_template_that_takes_too_long_is_tried_once_at_load():
    tried = []

    def too_slow(_render):
        tried.append(1)
        raise TimeoutError

    wrapper = wrap(byte_level(*MARKERS), template=templates.QWEN)
    text = Text(wrapper, vocab_size=2000, context_length=100, limit_template=too_slow)
    assert text.abilities.tools == ""
    assert tried == [1]


def test_a_tool_with_a_grammar_has_one_argument_in_the_prompt():
    text = text_of(templates.QWEN, *MARKERS)
    tool = Tool(name="patch", grammar=Grammar("regex", ".*"))
    assert '"required": ["input"]' in rendered(text, [ASKED], tools=[tool])


def test_any_number_of_notes_is_joined_in_linear_time():
    notes = [ChatMessage("system", "a" * 98)] * 60_000

    def join() -> None:
        (message,) = system_notes.place(notes, system=True, late=False)
        assert len(message.content) == 60_000 * 100 - 2

    assert takes_less_than(4, join)  # joined one by one: over 10 s, between two steps
