"""Ordered consumption on top of `receiving`: allotment, lock, window. No I/O."""
