"""What things are: values without I/O, clock or randomness."""
