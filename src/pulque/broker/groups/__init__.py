"""Manage consumer groups: subscriptions, resets, pull locks, ordered groups."""
