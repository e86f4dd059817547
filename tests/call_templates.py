"""Small chat templates that write calls, results and thoughts as public families of models do, for tests."""

import chats

__all__ = ["FAMILIES", "SINGLE", "tokenizer"]


def _chat(call, *, start="<|im_start|>{r}\n", end="<|im_end|>\n", between="", result=None, around=("", "")):
    """A template with a header and an end of turns, and calls between two texts."""
    head = start.replace("{r}", "{{ m.role }}")
    ask = start.replace("{r}", "assistant")
    result = result or "{{ m.content }}"
    return (
        "{% for m in messages %}" + head + "{% if m.role == 'tool' %}" + result + "{% else %}{{ m.content }}"
        "{% if m.tool_calls %}" + around[0] + "{% for c in m.tool_calls %}{% set f = c.function %}" + call
        + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}" + around[1]
        + "{% endif %}{% endif %}"
        + end + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"
    )  # fmt: skip


_OBJECT = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
_ITEMS = "{% for k, v in f.arguments.items() %}"

# Llama 3: one bare object, with "parameters"; a result by another role, as JSON
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|head|>{{ role }}<|/head|>\n\n{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ {'name': f.name, 'parameters': f.arguments} | tojson }}{% elif m.role == 'tool' %}"
    "{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)

# gpt-oss: the name in the header, one call, thoughts in a channel, other ends, results behind calls only
GPT_OSS = """{% if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{% set tool = tool.function %}{{ '// ' + tool.description + '\n' }}
{{- 'type ' + tool.name }}{% endfor %}<|end|>{% endif %}{% set last = namespace(name=none) %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}{{- '<|call|>' }}{% set last.name = f.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no call before the result') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

_MISTRAL_ID = (
    "{% if m.role == 'tool' and (m.tool_call_id is not defined or m.tool_call_id | length != 9) %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
)
_CALL_ID = "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('an id of 9') }}{% endif %}"

# Gemma: texts between marks, other values bare
_VALUE = (
    "{% macro value(x) %}{% if x is string %}QxQ{% elif x is boolean %}{{ 'true' if x else 'false' }}"
    "{% elif x is mapping %}{{ '{' }}{% for k, v in x.items() %}{{ k }}:{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif x is iterable %}["
    "{% for v in x %}{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ x }}{% endif %}{% endmacro %}"
)
_BRACES = (
    "call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
)


def _gemma(opening, closing, quote):
    call = opening + _BRACES + closing
    return _VALUE.replace("QxQ", f"{{{{ '{quote}' + x + '{quote}' }}}}") + _chat(
        call, start="<turn>{r}\n", end="</turn>\n"
    )


_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ v | tojson if v is string else v }}{% if not loop.last %}, {% endif %}{% endfor %})"
)

FAMILIES = {
    "Hermes, Qwen 2.5, Qwen 3": _chat("\n<tool_call>\n" + _OBJECT + "\n</tool_call>"),
    "Qwen 3 Coder, Qwen 3.5": _chat(
        "\n<tool_call>\n<function={{ f.name }}>\n" + _ITEMS + "<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "GLM 4.5": _chat(
        "\n<tool_call>{{ f.name }}\n" + _ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "GLM 4.7": _chat(
        "<tool_call>{{ f.name }}" + _ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
    ),
    "MiniMax M2": _chat(
        '<invoke name="{{ f.name }}">\n' + _ITEMS + '<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n",
        around=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "Seed-OSS": _chat(
        "<seed:tool_call>\n<function={{ f.name }}>\n" + _ITEMS + "<parameter={{ k }}>"
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
    ),
    "DeepSeek V3, R1": _chat(
        "<|call_begin|>function<|call_sep|>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```<|call_end|>",
        around=("<|calls_begin|>", "<|calls_end|>"),
        between="\n",
    ),
    "DeepSeek V3.1": _chat(
        "<|call_begin|>{{ f.name }}<|call_sep|>{{ '' + f.arguments }}<|call_end|>",
        around=("<|calls_begin|>", "<|calls_end|>"),
    ),
    "Kimi K2": _chat(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        result="## Return of {{ m.tool_call_id }}\n{{ m.content }}",
    ),
    "Mistral 7B 0.3": _MISTRAL_ID.join(
        _chat(
            _CALL_ID + "{{ {'name': f.name, 'arguments': f.arguments, 'id': c.id} | tojson }}",
            around=("[TOOL_CALLS] [", "]"),
            between=", ",
        ).split("{% for m in messages %}", 1)
    ).replace(_MISTRAL_ID, "{% for m in messages %}" + _MISTRAL_ID, 1),
    "Mistral Small 3.2": _chat("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    "Devstral, Magistral": _chat("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "Command R": _chat(
        "{{ {'tool_call_id': '0', 'tool_name': f.name, 'parameters': f.arguments} | tojson }}",
        around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        between=",\n    ",
    ),
    "Nemotron": _chat(_OBJECT, around=("<TOOLCALL>[", "]</TOOLCALL>"), between=", "),
    "Apertus": _chat(
        "{{ {f.name: f.arguments} | tojson }}",
        around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        between=", ",
    ),
    "LFM 2.5": _chat(_PYTHON, around=("<|tool_call_start|>[", "]<|tool_call_end|>"), between=", "),
    "OLMo 3": _chat(_PYTHON, around=("<function_calls>", "</function_calls>"), between="\n"),
    "FunctionGemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "Gemma 4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "Llama 3.1, 3.2": LLAMA,
    "gpt-oss": GPT_OSS,
}
_HARMONY = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip
SINGLE = ("Llama 3.1, 3.2", "gpt-oss")  # one call a turn


def tokenizer(family):
    """A tokenizer with the template of a family."""
    return chats.tokenizer(FAMILIES[family], more=_HARMONY if family == "gpt-oss" else ())
