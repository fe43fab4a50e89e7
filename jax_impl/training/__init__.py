"""Training of models and draft heads, with the same parameter names as serving."""
