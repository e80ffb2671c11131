"""Requests and responses of the administration API, one module per noun."""
