"""Config classes of transformers for each supported family: field defaults and aliases.

A config.json may omit any field at its class default, and transformers writes some fields under
another name than it reads. `tests/models/test_config_classes.py` compares the tables with the
installed transformers. One module has the classes of one group of families, as in
`shared.models.family_records`.
"""
