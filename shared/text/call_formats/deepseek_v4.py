"""DSML in `<｜DSML｜tool_calls>`: DeepSeek V4."""

from shared.text.call_formats.dsml_calls import dsml_format

FORMAT = dsml_format("deepseek_v4", "tool_calls")
