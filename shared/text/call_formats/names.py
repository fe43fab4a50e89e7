"""Names of tool-call formats; the command line reads them before packages are imported."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hermes": ("qwen", "qwen25", "smollm3", "granite4"),
    "qwen3_coder": ("qwen3_xml",),
    "llama3": ("llama3_json",),
    "pythonic": ("llama4_pythonic",),
    "mistral": (),
    "glm45": ("glm", "glm47"),
    "granite": (),
    "phi4": ("phi4_mini_json",),
    "deepseek_v3": ("deepseekv3",),
    "deepseek_v31": ("deepseekv31",),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "kimi_k2": (),
    "kimi_k3": (),
    "minimax_m2": ("minimax-m2",),
    "harmony": ("gpt-oss", "openai"),
    "gemma4": (),
    "functiongemma": (),
    "nemotron": ("nemotron_json",),
    "hy3": (),
    "cohere": ("cohere_command3",),
}
"""Values of `--tool-call-parser`, and other names of each format."""

ALIASES = {alias: name for name, others in OTHER_NAMES.items() for alias in others}
"""Names of formats by their other names."""
