"""Chat templates like those of five families: places of tools and calls, dropped content."""

QWEN3 = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- 'Functions:' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + content.split('</think>')[-1].lstrip('\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
"""Reasoning of earlier answers is dropped."""

LLAMA3 = """
{%- set told = namespace(tools=false) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant<|end|>{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>ipython<|end|>' + message.content | tojson + '<|eot|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|end|>\n\n' }}
{%- if tools and message.role == 'user' and not told.tools %}
{%- set told.tools = true %}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{{- (message.content or '') | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{% endif %}
"""
"""An answer with a call has no content; results are JSON; without a user there are no tools."""

DEEPSEEK = """
{%- set told = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
{%- set told.system = told.system + message.content + '\n\n' %}
{%- endfor %}
{{- told.system }}
{%- for tool in tools or [] %}
{{- '### ' + tool.function.name + '\n' + tool.function.parameters | tojson + '\n' }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|Assistant|>' + (message.content or '').split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>function<|sep|>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson + '\n```<|call end|>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- elif message.role == 'tool' %}{{- '<|output|>' + message.content + '<|output end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}
"""
"""System messages are joined at the beginning."""

GEMMA3 = """
{%- if messages[0].role == 'system' %}
{%- set first, rest = messages[0].content + '\n\n', messages[1:] %}
{%- else %}
{%- set first, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (first if loop.first else '') + (message.content or '') | trim + '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\n' }}{% endif %}
"""
"""No tools, and the system message is part of the first user's."""

MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}
{%- if loop.first or messages[0].role != 'system' or message != users[0] %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- else %}
{{- '[INST]' + messages[0].content + '\n\n' + message.content + '[/INST]' }}
{%- endif %}
{%- elif message.tool_calls %}
{{- '[CALLS][' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}' + (']' if loop.last else ', ') }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + '</s>' }}
{%- elif message.role == 'tool' %}{{- '[RESULT]{"content": ' + message.content | tojson + '}' }}
{%- endif %}
{%- endfor %}
"""
"""Tools precede the last user message; an answer with calls has no content."""

TEMPLATES = {
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "deepseek": DEEPSEEK,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
}
