"""The audit: check that sent = stored = settled + dead + waiting."""
