"""A data directory: file names, identity, cluster membership, free space."""
