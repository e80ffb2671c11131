"""Checks and conversions of the arguments that applications pass."""
