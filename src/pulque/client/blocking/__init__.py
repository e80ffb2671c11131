"""The blocking client: sockets, threads, and the public classes of `pulque`."""
