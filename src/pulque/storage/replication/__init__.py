"""Replicate a data directory: what a leader serves, and what a follower stores."""
