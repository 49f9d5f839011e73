"""Chat templates of known models, which `make clients` takes from llama.cpp's source.

For each: the forms that are found, the conversations that agents send, and calls that are read back
as they were rendered. Tokens do not matter here; markers are tokens of a small vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import json
import re

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from transformers import PreTrainedTokenizerFast

from kvd.worker.text.text import Text
from protocol.tools import ChatOptions, Tool, ToolCall
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.pages import ROOT
from tests.worker.text.tokenizers_zoo import byte_level

FOLDER = ROOT / ".venv" / "clients" / "templates"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs chat templates: `make clients`"),
]
KNOWN = """\
Apertus-8B-Instruct: noted: json in <tool_call> / <|inner_prefix|>
Apriel-1.6-15b-Thinker-fixed: json list in <tool_calls> / -
Bielik-11B-v3.0-Instruct: json in <tool_call> / <think>
ByteDance-Seed-OSS: xml in <seed:tool_call> / <seed:think>
Cohere2MoE: json list in <|START_ACTION|> / <|START_THINKING|>
CohereForAI-c4ai-command-r7b-12-2024-tool_use: json list in <|START_ACTION|> / <|START_THINKING|>
GLM-4.6: keys and values in <tool_call> / <think>
GLM-4.7-Flash: keys and values in <tool_call> / <think>
GigaChat3-10B-A1.8B: noted: json in <tool_call> / -
GigaChat3.1-10B-A1.8B: noted: json in <tool_call> / -
HuggingFaceTB-SmolLM3-3B: noted: json in <tool_call> / <think>
Kimi-K2-Instruct: json in <|tool_call_begin|> / -
Kimi-K2-Thinking: json in <|tool_call_begin|> / <think>
Kimi-K3: XTML / <|open|>think<|sep|>
LFM2-8B-A1B: pythonic in <|tool_call_start|> / -
LFM2.5-8B-A1B: pythonic in <|tool_call_start|> / <think>
LFM2.5-Instruct: noted: json in <tool_call> / <think>
MiMo-VL: json in <tool_call> / -
MiniMax-M1: json in <tool_calls> / -
MiniMax-M2: xml in <minimax:tool_call> / <think>
MiniMax-M3: noted: json in <tool_call> / <mm:think>
Mistral-Small-3.2-24B-Instruct-2506: name and json after [TOOL_CALLS] / -
NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: xml in <tool_call> / <think>
NVIDIA-Nemotron-Nano-v2: json list in <TOOLCALL> / <think>
NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use: json in <tool_call> / -
NousResearch-Hermes-3-Llama-3.1-8B-tool_use: json in <tool_call> / -
Qwen-QwQ-32B: json in <tool_call> / <think>
Qwen-Qwen2.5-7B-Instruct: json in <tool_call> / -
Qwen-Qwen3-0.6B: json in <tool_call> / <think>
Qwen3-Coder: xml in <tool_call> / -
Qwen3.5-4B: xml in <tool_call> / <think>
Reka-Edge: json in <tool_call> / <think>
Spark2.5: keys and values in <tool_call> / <think>
StepFun3.5-Flash: xml in <tool_call> / <think>
deepseek-ai-DeepSeek-R1-Distill-Llama-8B: noted: json block of DeepSeek R1 / <think>
deepseek-ai-DeepSeek-R1-Distill-Qwen-32B: noted: json block of DeepSeek R1 / <think>
deepseek-ai-DeepSeek-V3.1: noted: json in <|tool_call_begin|> of DeepSeek / <think>
deepseek-ai-DeepSeek-V3.2: xml in <%DSML%function_calls> / <think>
deepseek-ai-DeepSeek-V4-Flash-0731: xml in <%DSML%tool_calls> / <think>
deepseek-ai-DeepSeek-V4: xml in <%DSML%tool_calls> / <think>
google-gemma-2-2b-it: noted: json in <tool_call> / -
google-gemma-4-31B-it-interleaved: call:name in <|tool_call> / <|channel>thought
google-gemma-4-31B-it: call:name in <|tool_call> / <|channel>thought
ibm-granite-granite-3.3-2B-Instruct: json list after <|tool_call|> / <think>
ibm-granite-granite-4.0: json in <tool_call> / -
ibm-granite-granite-4.1: json in <tool_call> / -
inclusionai-ling-3.0-flash: keys and values in <tool_call> / <think>
llama-cpp-deepseek-r1: noted: json block of DeepSeek R1 / <think>
llama-cpp-rwkv-world: noted: json in <tool_call> / <think>
meetkai-functionary-medium-v3.1: json in <function=name> / -
meetkai-functionary-medium-v3.2: noted: json in <tool_call> / -
meta-llama-Llama-3.1-8B-Instruct: json / -
meta-llama-Llama-3.2-3B-Instruct: json / -
meta-llama-Llama-3.3-70B-Instruct: json / -
microsoft-Phi-3.5-mini-instruct: noted: json in <tool_call> / -
mistralai-Ministral-3-14B-Reasoning-2512: name and json after [TOOL_CALLS] / [THINK]
mistralai-Mistral-Nemo-Instruct-2407: json list after [TOOL_CALLS] / -
moonshotai-Kimi-K2: json in <|tool_call_begin|> / -
muse-glimmer: xml in <atem:function_calls> / -
openai-gpt-oss-120b: harmony / <|channel|>analysis
openbmb-MiniCPM5-1B: xml in <function> / <think>
poolside-Laguna-S-2.1: keys and values in <tool_call> / <think>
poolside-Laguna-XS-2.1: keys and values in <tool_call> / <think>
poolside-Laguna-XS.2: keys and values in <tool_call> / <think>
tencent-Hy3: noted: json in <tool_call> / -
unsloth-Apriel-1.5: json list in <tool_calls> / -
unsloth-mistral-Devstral-Small-2507: name and json after [TOOL_CALLS] / -
upstage-Solar-Open-100B: noted: json in <tool_call> / -
"""
"""Form of calls and beginning of the reasoning; ``-``: none. ``%``: DeepSeek's wide bar.
``noted``: tools are listed in the system message.

Not listed: command-r-plus and firefunction, whose templates take no conversation without tools.
"""
FORMS = dict(line.split(": ", 1) for line in KNOWN.replace("%", "\uff5c").splitlines())
NEED_TOOLS = [name for name in FORMS if "Hermes" in name]
"""Their folders have another template for conversations without tools."""
MARKERS = (
    r"<[|\uff5c][^<>{}\n]{1,40}[|\uff5c]>|</?[a-z_]+[a-z_:]*>"
    r"|\[/?[A-Z_]{3,}\]|<\|[a-z_]+>|<[a-z_]+\|>"
)
WEATHER = Tool(
    "get_weather",
    description="The weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "Days."},
            "wind": {"type": "boolean", "description": "Wind, too?"},
        },
        "required": ["city"],
    },
)
ARGUMENTS = [{"city": 'Köln "x" <b>', "days": 2}, {"city": "Rome", "wind": True}]
SYSTEM = ChatMessage("system", "Be brief.")
ASKED = ChatMessage("user", "How is it?")
MORE = ChatMessage("user", "And then?")
ANSWER = ChatMessage("assistant", "It is fine.")


def calling(count: int, text: str = "") -> ChatMessage:
    calls = [
        ToolCall("get_weather", json.dumps(given, ensure_ascii=False), f"call_number_{number}")
        for number, given in enumerate(ARGUMENTS[:count])
    ]
    return ChatMessage("assistant", text, tool_calls=calls)


RESULTS = [
    ChatMessage(
        "tool", f"{number} degrees", tool_call_id=f"call_number_{number}", name="get_weather"
    )
    for number in range(2)
]
CONVERSATIONS = {
    "system": [SYSTEM, ASKED],
    "two questions": [SYSTEM, ASKED, MORE],
    "answer": [ASKED, ANSWER, MORE],
    "call": [ASKED, calling(1), RESULTS[0]],
    "two calls": [ASKED, calling(2), *RESULTS, ANSWER, MORE],
    "a call without result": [ASKED, calling(1), MORE],
    "a question after a result": [ASKED, calling(1), RESULTS[0], MORE],
    "a late system message": [ASKED, ANSWER, SYSTEM, MORE],
    "two answers": [ASKED, ANSWER, calling(1), RESULTS[0]],
}


CHAT = ChatOptions(tools=[WEATHER])


@functools.cache
def text_of(name: str) -> Text:
    source = (FOLDER / f"{name}.jinja").read_text()
    added = sorted(set(re.findall(MARKERS, source)))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(*added), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.chat_template = source
    options = {}
    if (parser := _infer_tool_parser(fast)) is not None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        options = {"tool_parser": module.parse_tool_call}
        options |= {key: getattr(module, key) for key in ("tool_call_start", "tool_call_end")}
    return Text(TokenizerWrapper(fast, **options), vocab_size=5000, context_length=100_000)


def rendered(text: Text, messages: list[ChatMessage], **arguments: bool) -> str:
    adapted = text.template.messages.adapt(messages)
    return text.template._apply(adapted, {**text.template._arguments(CHAT), **arguments})


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_a_model(name: str) -> None:
    found = text_of(name).abilities
    noted = "noted: " if found.tools_noted else ""
    assert f"{noted}{found.tools} / {found.reasoning or '-'}" == FORMS[name]


@pytest.mark.parametrize("name", FORMS)
def test_conversations_of_agents(name: str) -> None:
    """Every text arrives, except that many templates drop an answer's text before its calls."""
    text = text_of(name)
    for case, messages in CONVERSATIONS.items():
        for tools in [[WEATHER]] if name in NEED_TOOLS else [[WEATHER], []]:
            found = text.template.render(messages, ChatOptions(tools=tools))
            shown = [one.content for one in messages if one is not ANSWER or case == "answer"]
            shown += [json.loads(call.arguments)["city"] for m in messages for call in m.tool_calls]
            for one in shown:
                written = (one, json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1])
                assert any(form in found for form in written), (case, one)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_rendered_calls_are_read_back(name: str, count: int) -> None:
    text = text_of(name)
    if count > 1 and text.template.messages.single_calls:
        pytest.skip("the template shows one call in a message")
    answer = rendered(text, [ASKED, calling(count)], add_generation_prompt=False)
    prompts = (rendered(text, [ASKED], add_generation_prompt=one) for one in (True, False))
    start = next(len(prompt) for prompt in prompts if answer.startswith(prompt))
    request = Submit(rid="r", sampling=Sampling(), messages=[ASKED], chat=CHAT)
    encode = text._tokenizer.encode
    stream = text.stream(request, encode(answer[:start], add_special_tokens=False))
    tokens = encode(answer[start:], add_special_tokens=False)
    written = ("".join(map(stream.push, tokens)) + stream.finish()).encode()
    parts = stream.take_parts()
    ends = [*(part.at for part in parts[1:]), len(written)]
    found = [
        (part.name, json.loads(written[part.at : end]))
        for part, end in zip(parts, ends, strict=True)
        if part.kind == "call"
    ]
    assert found == [("get_weather", given) for given in ARGUMENTS[:count]]
