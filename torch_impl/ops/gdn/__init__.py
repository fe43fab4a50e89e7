"""Gated delta net: prefill, decode, tree verification, state commit."""
