"""Small chat templates, one for each form in which model families write calls."""

_FRAME = """
{%- for tool in tools or [] %}{{- '[T]' + tool | tojson }}{% endfor %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') }}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
_EACH = """
{%- for call in message.tool_calls %}
{%- set name, arguments = call.function.name, call.function.arguments %}
EACH
{%- endfor %}
"""


_VALUE = """
{%- macro value(given) -%}
{%- if given is string -%}{{ 'QUOTE' + given + 'QUOTE' }}
{%- elif given is boolean -%}{{ 'true' if given else 'false' }}
{%- elif given is mapping -%}{%- raw -%}{{%- endraw -%}
{%- for key, each in given | dictsort -%}
{{ key + ':' + value(each) + ('' if loop.last else ',') }}
{%- endfor -%}{%- raw -%}}{%- endraw -%}
{%- elif given is sequence -%}[
{%- for each in given -%}{{ value(each) + ('' if loop.last else ',') }}{%- endfor -%}]
{%- else -%}{{ given }}
{%- endif -%}
{%- endmacro -%}
"""


def _framed(each: str, before: str = "", after: str = "") -> str:
    calls = f"{{{{- '{before}' }}}}{_EACH.replace('EACH', each)}{{{{- '{after}' }}}}"
    return _FRAME.replace("CALLS", calls)


_DSML = _framed(
    "{{- '<｜DSML｜invoke name=\"' + name + '\">\\n' }}"
    "{%- for key, value in arguments | items %}{{- '<｜DSML｜parameter name=\"' + key }}"
    "{{- '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    "{{- value if value is string else value | tojson }}{{- '</｜DSML｜parameter>\\n' }}"
    "{%- endfor %}{{- '\\n' if not arguments else '' }}{{- '</｜DSML｜invoke>\\n' }}",
    "\\n\\n<｜DSML｜SECTION>\\n",
    "</｜DSML｜SECTION>",
)
_KIND = """
{%- macro kind(given) -%}
{%- if given is boolean -%}boolean
{%- elif given is none -%}null
{%- elif given is number -%}number
{%- elif given is string -%}string
{%- elif given is mapping -%}object
{%- else -%}array
{%- endif -%}
{%- endmacro -%}
"""

CALL_TEMPLATES = {
    "deepseek_v32": (
        "deepseek_v32",
        _DSML.replace("SECTION", "function_calls"),
    ),
    "deepseek_v4": (
        "deepseek_v4",
        _DSML.replace("SECTION", "tool_calls"),
    ),
    "kimi_k3": (
        "kimi_k3",
        _KIND
        + _framed(
            "{{- '<|open|>call tool=\"' + name + '\" index=\"' ~ loop.index ~ '\"<|sep|>' }}"
            "{%- for key, value in arguments | items %}"
            "{{- '<|open|>argument key=\"' + key + '\" type=\"' + kind(value) + '\"<|sep|>' }}"
            "{{- value if value is string else value | tojson }}{{- '<|close|>argument<|sep|>' }}"
            "{%- endfor %}{{- '<|close|>call<|sep|>' }}",
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
        ),
    ),
    "nemotron": (
        "nemotron",
        _framed(
            "{{- '{\"name\": \"' + name + '\", \"arguments\": ' + arguments | tojson + '}' }}"
            "{{- '' if loop.last else ', ' }}",
            "<TOOLCALL>[",
            "]</TOOLCALL>",
        ),
    ),
    "hy3": (
        "hy3",
        _framed(
            "{{- '<tool_call:opensource>' + name + '<tool_sep:opensource>\\n' }}"
            "{%- for key, value in arguments | items %}"
            "{{- '<arg_key:opensource>' + key + '</arg_key:opensource>\\n<arg_value:opensource>' }}"
            "{{- value if value is string else value | tojson }}"
            "{{- '</arg_value:opensource>\\n' }}{%- endfor %}"
            "{{- '</tool_call:opensource>\\n' }}",
            "<tool_calls:opensource>\\n",
            "</tool_calls:opensource>",
        ),
    ),
    "cohere": (
        "cohere",
        _framed(
            '{{- \'{"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' + name }}'
            "{{- '\", \"parameters\": ' + arguments | tojson + '}' }}"
            "{{- '\\n' if loop.last else ',\\n    ' }}",
            "<|START_ACTION|>[\\n    ",
            "]<|END_ACTION|>",
        ),
    ),
    "mistral list": (
        "mistral",
        _framed(
            "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}"
            "{% endif %}{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
            "{{- '' if loop.last else ', ' }}",
            "[TOOL_CALLS][",
            "]",
        ),
    ),
    "mistral names": (
        "mistral",
        _framed("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments | tojson }}"),
    ),
    "glm45": (
        "glm45",
        _framed(
            "{{- '\\n<tool_call>' + name }}{%- for key, value in arguments | items %}"
            "{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
            "{{- value if value is string else value | tojson }}{{- '</arg_value>' }}"
            "{%- endfor %}{{- '\\n</tool_call>' }}"
        ),
    ),
    "phi4": (
        "phi4",
        _framed("{{- '<|tool_call|>' + call.function | tojson + '<|/tool_call|>' }}"),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _framed(
            "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n' }}"
            "{{- arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": (
        "deepseek_v31",
        _framed(
            "{{- '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments | tojson }}"
            "{{- '<｜tool▁call▁end｜>' }}",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "minimax_m2": (
        "minimax_m2",
        _framed(
            "{{- '<invoke name=\"' + name + '\">\\n' }}"
            "{%- for key, value in arguments | items %}{{- '<parameter name=\"' + key + '\">' }}"
            "{{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}"
            "{%- endfor %}{{- '</invoke>\\n' }}",
            "\\n<minimax:tool_call>\\n",
            "</minimax:tool_call>",
        ),
    ),
    "harmony": (
        "harmony",
        _framed(
            "{{- '<|channel|>commentary to=functions.' + name + ' <|constrain|>json<|message|>' }}"
            "{{- arguments | tojson }}{{- '' if loop.last else '<|call|><|start|>assistant' }}"
        ),
    ),
    "gemma4": (
        "gemma4",
        _VALUE.replace("QUOTE", '<|"|>')
        + _framed("{{- '<|tool_call>call:' + name + value(arguments) + '<tool_call|>' }}"),
    ),
    "functiongemma": (
        "functiongemma",
        _VALUE.replace("QUOTE", "<escape>")
        + _framed(
            "{{- '<start_function_call>call:' + name + value(arguments) + '<end_function_call>' }}"
        ),
    ),
    "pythonic": (
        "pythonic",
        _framed(
            "{{- name + '(' }}{%- for key, value in arguments | items %}"
            "{{- key + '=' + value | tojson + ('' if loop.last else ', ') }}{%- endfor %}"
            "{{- ')' + ('' if loop.last else ', ') }}",
            "[",
            "]",
        ),
    ),
}
"""Format, and a template that writes it."""

DESCRIBED = "{{- 'Respond only with <|tool_call|> followed by a JSON list.' }}" + _FRAME.replace(
    "CALLS", ""
)
"""Template that describes Granite's format to the model, and drops calls."""
