"""Ranks of one model that are processes: started, kept together, and ended with each other."""
