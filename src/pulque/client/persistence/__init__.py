"""The files that producers and consumers keep over a restart: identity, positions, spools."""
