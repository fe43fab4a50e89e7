"""Records of the supported model families, one module for each group of similar families.

A module defines the tables of `shared.models.architectures` for its families.
"""
