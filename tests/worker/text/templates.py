"""Small chat templates in the styles of known models."""

from __future__ import annotations

_TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"
QWEN = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
# Tools, as JSON
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if \
call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
CODER = """\
{%- if tools %}{% for tool in tools %}{{ tool.function.name }}
{% endfor %}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
LLAMA = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}
[{{ 'ipython' if m.role == 'tool' else m.role }}]
{%- if loop.first and tools %} Functions: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %} {{ m.content }}{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}[SYSTEM]{{ messages[0].content }}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('unknown role ' + m.role) }}
{%- endif %}{% endfor %}"""
GEMMA = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}
{%- endif %}<start>{{ m.role }}
{{ m.content }}<end>
{% endfor %}
{%- if add_generation_prompt %}<start>model
{% endif %}"""
GPT_OSS = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
<|start|>system<|message|>Reasoning: {{ effort }}<|end|>
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary\
<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.\
{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>\
{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- if loop.first and tools %}<|start|>developer<|message|>{% for tool in tools %}type \
{{ tool.function.name }} = (_: any);{% endfor %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
STRICT_EFFORT = """\
{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}
{{- raise_exception('unknown effort ' + reasoning_effort) }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}effort {{ reasoning_effort or 'medium' }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT_ARGUMENTS = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments + '' }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
