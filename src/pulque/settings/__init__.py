"""Settings of servers: where they come from, what is allowed, and what a server logs."""
