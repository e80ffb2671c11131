"""Settings of servers: sources, validation, and logging."""
