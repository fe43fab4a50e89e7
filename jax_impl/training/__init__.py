"""Training of models and draft heads, on the parameters that serving holds."""
