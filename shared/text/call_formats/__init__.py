"""Tool-call formats: a module each with delimiters, parser, grammar and writer; a registry."""
