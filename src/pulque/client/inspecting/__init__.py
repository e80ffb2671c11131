"""Requests and answers for dead letters, search, stored and delayed messages, groups."""
