"""The HTTP layer: connection limits, request checks, error responses, turns of requests."""
