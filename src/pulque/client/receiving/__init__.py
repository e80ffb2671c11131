"""The consumer without I/O: pull, hold, acknowledge, prefetch, error policy."""
