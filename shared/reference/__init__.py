"""Reference backend in numpy, built from the specifications: the oracle of the tests."""
