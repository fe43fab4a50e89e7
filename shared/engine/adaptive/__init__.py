"""Adaptive speculation: chooses the draft shape of each step from measured costs and acceptance
rates.
"""
