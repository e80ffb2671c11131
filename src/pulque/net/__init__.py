"""asyncio around ``wire``: connections, and nothing that knows what the frames mean."""
