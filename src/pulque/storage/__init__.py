"""Store messages and facts in files. Synchronous, without network."""
