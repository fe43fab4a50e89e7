"""Recurrent layers (gated delta nets): prefill, decode, tree verification, state commit."""
