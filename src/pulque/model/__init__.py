"""Values: messages, batches, names, ids, routes. No I/O, clock or randomness."""
