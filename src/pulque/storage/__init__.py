"""Where things rest: files, synchronous, without network."""
