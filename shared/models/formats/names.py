"""Names of the encodings of quantised weights: values of `--quantization`.

The module imports nothing, so that the command line lists them without NumPy.
"""

FP8, INT4, MXFP4 = "fp8", "int4", "mxfp4"
ENCODINGS = (FP8, INT4, MXFP4)
"""All encodings, the keys of `shared.models.formats.registry.QUANTIZATIONS`."""
