"""Process acks and nacks: retries, dead letters, nacks adopted from other brokers."""
