"""The library that applications import: cores without I/O, and two thin shells around them."""
