"""Indexes derived from the logs: consume logs and key indexes. All can be rebuilt."""
