"""Decisions as state machines: facts in, effects out; no I/O, no clock, no randomness."""
