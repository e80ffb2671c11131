"""Keyword arguments of `Client` turned into the objects that the cores need."""
