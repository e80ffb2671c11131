"""Handlers: functions that are called with messages, and the loop that calls them."""
