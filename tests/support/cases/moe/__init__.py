"""Mixture of experts: routing, token alignment, expert GEMMs."""
