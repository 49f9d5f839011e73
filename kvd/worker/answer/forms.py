"""The forms in which models write reasoning and tool calls.

A form is a pure description. `kvd.worker.answer.find` finds a model's forms at load; the parser and
grammars use them. Whitespace in a form is what models write; parsers accept any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Marker:
    """A text that separates parts of an answer."""

    text: str
    """The text; empty: there is no marker."""
    token: int | None = None
    """Its id, if it is one token that was added to the vocabulary. Then only this token is the
    marker, and the same characters in other tokens are not. None: it is found by its text."""

    def __bool__(self) -> bool:
        return bool(self.text)


NONE = Marker("")


@dataclass(frozen=True)
class ReasoningForm:
    """How reasoning begins and ends."""

    begin: Marker
    end: Marker


@dataclass(frozen=True)
class JsonBody:
    """A JSON object with name and arguments: ``{"name": "f", "arguments": {"x": 1}}``."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = False
    """Whether the body is a JSON array of such objects, one for each call."""
    id_key: str = ""
    """Key of the call's number, as text, which may come first; empty: calls have none."""


@dataclass(frozen=True)
class NamedBody:
    """The name, then the arguments as a JSON object: ``f[ARGS]{"x": 1}``.

    The texts around the name may be tokens of their own, such as ``[ARGS]``.
    """

    before_name: str
    """Text before the name, such as ``functions.``; may be empty."""
    after_name: str
    """Text between name and arguments."""
    numbered: bool = False
    """Whether ``:`` and the number of the call, from 0, follow the name."""
    end: str = ""
    """Text after the arguments; may be empty."""


@dataclass(frozen=True)
class XmlBody:
    """The name, then pairs of key and value.

    A string is written without quotes or escapes, any other value as JSON.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    """Text between a key and its value."""
    after_value: str
    end: str
    """Text after the last value; may be empty."""
    after_json_key: str = ""
    """Text between a key and a value that is JSON and no string; empty: ``after_key``."""


@dataclass(frozen=True)
class WholeBody:
    """A body that one of mlx-lm's parsers reads once it is complete."""

    parser: str
    """Module in `mlx_lm.tool_parsers`."""


Body = JsonBody | NamedBody | XmlBody | WholeBody


@dataclass(frozen=True)
class CallForm:
    """How tool calls are written.

    One call: ``begin``, ``before``, the body, ``after``, ``end``. All calls of an answer together,
    with ``between`` in between, are inside ``section``, if the form has one.
    """

    name: str
    """Description such as ``json in <tool_call>``."""
    begin: Marker
    """Opening marker of each call. Empty: the body itself shows where a call begins; without a
    section, the answer's text must then begin with it."""
    end: Marker
    """Closing marker of each call. Empty: a call ends with its body."""
    body: Body
    before: str = ""
    after: str = ""
    between: str = ""
    section: tuple[Marker, Marker] | None = None
    """Markers around all calls. The second may be empty: the section ends with the answer."""

    @property
    def opening(self) -> Marker:
        """The marker that the first call of an answer begins with; may be empty."""
        return self.section[0] if self.section is not None else self.begin


@dataclass(frozen=True)
class HarmonyForm:
    """gpt-oss: an answer is a sequence of messages, each in a channel.

    ``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``. A
    call is a message with a recipient: ``<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"x": 1}<|call|>``.
    """

    start: Marker
    channel: Marker
    message: Marker
    constrain: Marker
    end: Marker
    call: Marker
    role: str = "assistant"
    reasoning: str = "analysis"
    """Channel of the reasoning."""
    text: str = "final"
    """Channel of the answer's text."""
    calls: str = "commentary"
    """Channel of calls, and of text before them."""
    recipient: str = " to=functions."
    """Text before the tool's name in the header of a call."""


@dataclass(frozen=True)
class AnswerForms:
    """All forms of a model."""

    reasoning: ReasoningForm | None = None
    call: CallForm | None = None
    harmony: HarmonyForm | None = None
    """If present, it replaces the other two."""

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.harmony is not None

    @property
    def has_calls(self) -> bool:
        return self.call is not None or self.harmony is not None

    @property
    def call_markers(self) -> list[Marker]:
        """Markers of the form of calls; none for harmony, whose markers have several uses."""
        if self.call is None:
            return []
        return [self.call.begin, self.call.end, *(self.call.section or ())]

    @property
    def markers(self) -> list[Marker]:
        """All markers."""
        found = self.call_markers
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        if (form := self.harmony) is not None:
            found += [form.start, form.channel, form.message, form.constrain, form.end, form.call]
        return found

    @property
    def end_of_reasoning(self) -> str:
        """Text that ends the reasoning and begins the answer's text."""
        if (form := self.harmony) is not None:
            start = f"{form.end.text}{form.start.text}{form.role}"
            return f"{start}{form.channel.text}{form.text}{form.message.text}"
        return "" if self.reasoning is None else self.reasoning.end.text

    @property
    def calls(self) -> str:
        """Description of the form of calls; empty: the model has none."""
        if self.harmony is not None:
            return "harmony"
        return "" if self.call is None else self.call.name

    def with_tokens(self, token_of: Callable[[str], int | None]) -> AnswerForms:
        """Return the forms with ids: ``token_of`` returns the id of a marker that is one token."""

        def known(marker: Marker) -> Marker:
            return replace(marker, token=token_of(marker.text)) if marker else marker

        reasoning, call, harmony = self.reasoning, self.call, self.harmony
        if reasoning is not None:
            reasoning = ReasoningForm(known(reasoning.begin), known(reasoning.end))
        if call is not None:
            section = call.section and (known(call.section[0]), known(call.section[1]))
            call = replace(call, begin=known(call.begin), end=known(call.end), section=section)
        if harmony is not None:
            harmony = replace(
                harmony,
                start=known(harmony.start),
                channel=known(harmony.channel),
                message=known(harmony.message),
                constrain=known(harmony.constrain),
                end=known(harmony.end),
                call=known(harmony.call),
            )
        return AnswerForms(reasoning, call, harmony)


def opened_by_prompt(form: ReasoningForm, prompt: str) -> bool:
    """Return whether the end of a prompt began the reasoning, so that the answer begins in it."""
    begin, end = prompt.rfind(form.begin.text), prompt.rfind(form.end.text)
    return begin >= 0 and begin > end and not prompt[begin + len(form.begin.text) :].strip()


THINK = ReasoningForm(Marker("<think>"), Marker("</think>"))
REASONING = (
    THINK,
    ReasoningForm(Marker("<longcat_think>"), Marker("</longcat_think>")),
    ReasoningForm(Marker("<|think:start|>"), Marker("<|think:end|>")),
    ReasoningForm(Marker("[THINK]"), Marker("[/THINK]")),
    ReasoningForm(Marker("<seed:think>"), Marker("</seed:think>")),
    ReasoningForm(Marker("<|START_THINKING|>"), Marker("<|END_THINKING|>")),
    ReasoningForm(Marker("<|inner_prefix|>"), Marker("<|inner_suffix|>")),
    ReasoningForm(Marker("<mm:think>"), Marker("</mm:think>")),
    ReasoningForm(Marker("<|channel>thought"), Marker("<channel|>")),
    ReasoningForm(Marker("<|open|>think<|sep|>"), Marker("<|close|>think<|sep|>")),
)
"""Known forms of reasoning."""

_TOOL_CALL = (Marker("<tool_call>"), Marker("</tool_call>"))


def _pair(name: str) -> tuple[Marker, Marker]:
    return Marker(f"<{name}>"), Marker(f"</{name}>")


def _deepseek(words: str) -> Marker:
    """Return a marker with DeepSeek's bars and spaces."""
    return Marker("<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>")


def _xml(function: str, parameter: str) -> XmlBody:
    """Return the form with a name in an attribute, as MiniMax writes it."""
    return XmlBody(
        f'<{function} name="',
        '">\n',
        f'<{parameter} name="',
        '">',
        f"</{parameter}>\n",
        f"</{function}>",
    )


def _keys_and_values(prefix: str = "") -> XmlBody:
    return XmlBody(
        "", "\n", f"<{prefix}arg_key>", f"</{prefix}arg_key>\n<{prefix}arg_value>",
        f"</{prefix}arg_value>\n", "",
    )  # fmt: skip


QWEN = CallForm(
    "json in <tool_call>", *_TOOL_CALL, JsonBody(), before="\n", after="\n", between="\n"
)
QWEN_CODER = CallForm(
    "xml in <tool_call>",
    *_TOOL_CALL,
    XmlBody("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>"),
    before="\n",
    after="\n",
    between="\n",
)
SEED = CallForm(
    "xml in <seed:tool_call>",
    *_pair("seed:tool_call"),
    XmlBody("<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>"),
    before="\n",
    after="\n",
    between="\n",
)
GLM = CallForm("keys and values in <tool_call>", *_TOOL_CALL, _keys_and_values(), between="\n")
LONGCAT = CallForm(
    "keys and values in <longcat_tool_call>",
    *_pair("longcat_tool_call"),
    _keys_and_values("longcat_"),
    between="\n",
)
MINIMAX = CallForm(
    "xml in <minimax:tool_call>",
    NONE,
    NONE,
    _xml("invoke", "parameter"),
    between="\n",
    section=_pair("minimax:tool_call"),
)
MUSE = CallForm(
    "xml in <atem:function_calls>",
    NONE,
    NONE,
    _xml("atem:invoke", "atem:parameter"),
    between="\n",
    section=_pair("atem:function_calls"),
)
_DSML = "\uff5cDSML\uff5c"


def _dsml(section: str) -> CallForm:
    """Return DeepSeek's form, whose attribute ``string`` marks strings."""
    return CallForm(
        f"xml in <{_DSML}{section}>",
        NONE,
        NONE,
        XmlBody(
            f'<{_DSML}invoke name="',
            '">\n',
            f'<{_DSML}parameter name="',
            '" string="true">',
            f"</{_DSML}parameter>\n",
            f"</{_DSML}invoke>",
            after_json_key='" string="false">',
        ),
        between="\n",
        section=_pair(f"{_DSML}{section}"),
    )


DEEPSEEK_V32 = _dsml("function_calls")
DEEPSEEK_V4 = _dsml("tool_calls")
MISTRAL = CallForm(
    "name and json after [TOOL_CALLS]", Marker("[TOOL_CALLS]"), NONE, NamedBody("", "[ARGS]")
)
MISTRAL_LIST = CallForm(
    "json list after [TOOL_CALLS]", Marker("[TOOL_CALLS]"), NONE, JsonBody(listed=True)
)
KIMI = CallForm(
    "json in <|tool_call_begin|>",
    Marker("<|tool_call_begin|>"),
    Marker("<|tool_call_end|>"),
    NamedBody("functions.", "<|tool_call_argument_begin|>", numbered=True),
    section=(Marker("<|tool_calls_section_begin|>"), Marker("<|tool_calls_section_end|>")),
)
DEEPSEEK = CallForm(
    "json in <|tool_call_begin|> of DeepSeek",
    _deepseek("tool call begin"),
    _deepseek("tool call end"),
    NamedBody("", _deepseek("tool sep").text),
    section=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
)
DEEPSEEK_R1 = CallForm(
    "json block of DeepSeek R1",
    _deepseek("tool call begin"),
    _deepseek("tool call end"),
    NamedBody(f"function{_deepseek('tool sep').text}", "\n```json\n", end="\n```"),
    between="\n",
    section=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
)
FUNCTIONARY = CallForm(
    "json in <function=name>", Marker("<function="), Marker("</function>"), NamedBody("", ">")
)
COHERE = CallForm(
    "json list in <|START_ACTION|>",
    Marker("<|START_ACTION|>"),
    Marker("<|END_ACTION|>"),
    JsonBody("tool_name", "parameters", listed=True, id_key="tool_call_id"),
)
NEMOTRON = CallForm("json list in <TOOLCALL>", *_pair("TOOLCALL"), JsonBody(listed=True))
APRIEL = CallForm("json list in <tool_calls>", *_pair("tool_calls"), JsonBody(listed=True))
MINIMAX_M1 = CallForm(
    "json in <tool_calls>", NONE, NONE, JsonBody(), between="\n", section=_pair("tool_calls")
)
LLAMA = CallForm("json", NONE, NONE, JsonBody(arguments_key="parameters"), between="; ")
GRANITE = CallForm(
    "json list after <|tool_call|>", Marker("<|tool_call|>"), NONE, JsonBody(listed=True)
)
PHI = CallForm(
    "json list in <|tool_call|>",
    Marker("<|tool_call|>"),
    Marker("<|/tool_call|>"),
    JsonBody(listed=True),
)
PYTHONIC = CallForm(
    "pythonic in <|tool_call_start|>",
    Marker("<|tool_call_start|>"),
    Marker("<|tool_call_end|>"),
    WholeBody("pythonic"),
)
GEMMA = CallForm(
    "call:name in <|tool_call>", Marker("<|tool_call>"), Marker("<tool_call|>"), WholeBody("gemma4")
)
FUNCTION_GEMMA = CallForm(
    "call:name in <start_function_call>",
    Marker("<start_function_call>"),
    Marker("<end_function_call>"),
    WholeBody("function_gemma"),
)
MINICPM = CallForm(
    "xml in <function>", Marker("<function"), Marker("</function>"), WholeBody("minicpm5")
)
KIMI_K3 = CallForm(
    "XTML",
    Marker("<|open|>tools<|sep|>"),
    Marker("<|close|>tools<|sep|>"),
    WholeBody("kimi_k3"),
)
CALLS = (
    QWEN, QWEN_CODER, SEED, GLM, LONGCAT, MINIMAX, MINIMAX_M1, MUSE, MISTRAL_LIST, MISTRAL, KIMI,
    DEEPSEEK_R1, DEEPSEEK, DEEPSEEK_V32, DEEPSEEK_V4, COHERE, NEMOTRON, APRIEL, LLAMA, GRANITE, PHI,
    FUNCTIONARY, PYTHONIC, GEMMA, FUNCTION_GEMMA, MINICPM, KIMI_K3,
)  # fmt: skip
"""Known forms of calls."""

HARMONY = HarmonyForm(
    start=Marker("<|start|>"),
    channel=Marker("<|channel|>"),
    message=Marker("<|message|>"),
    constrain=Marker("<|constrain|>"),
    end=Marker("<|end|>"),
    call=Marker("<|call|>"),
)
