"""DSML in `<｜DSML｜function_calls>`: DeepSeek V3.2."""

from shared.text.call_formats.dsml_calls import dsml_format

FORMAT = dsml_format("deepseek_v32", "function_calls")
