"""The executable specifications: numpy, slow and clear; what the backends compute is told here."""
