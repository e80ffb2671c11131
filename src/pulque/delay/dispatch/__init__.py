"""Send due messages to brokers, batch by batch, and keep those that brokers refuse."""
