"""Executable specifications in numpy: the normative reference implementation of every operation."""
