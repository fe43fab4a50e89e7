"""Names of the encodings of quantised weights: values of `--quantization`.

The module imports nothing, so that the command line lists them without NumPy.
"""

FP8 = "fp8"
ENCODINGS = (FP8,)
"""All encodings, the keys of `shared.models.formats.registry.QUANTIZATIONS`."""
