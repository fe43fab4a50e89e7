"""A draft shape for every step: what each costs, how much of it is accepted, and so which."""
