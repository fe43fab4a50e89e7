"""All that exists once for both backends; no jax, torch or triton anywhere in it."""
