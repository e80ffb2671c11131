"""Hand messages to consumers: plan a pull, read it, or hold it until messages arrive."""
