"""Leases and elections of the leaders of broker groups."""
