"""What may happen: facts in, effects out; no I/O, no clock, no randomness."""
