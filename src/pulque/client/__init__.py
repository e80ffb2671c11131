"""The library that applications import: one core without I/O, and two thin shells around it."""
