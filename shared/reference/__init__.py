"""The boundary in numpy, made of the specifications: the oracle of the tests."""
