"""Find stored messages by key, id or time, and maintain the key index."""
