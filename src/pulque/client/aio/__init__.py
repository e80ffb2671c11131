"""The asyncio client: connections, tasks, and the public classes of `pulque.aio`."""
