"""The commands that run servers: `pulque up`, `broker`, `delay`, `meta`."""
