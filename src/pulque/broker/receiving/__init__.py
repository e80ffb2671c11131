"""Check, deduplicate and append batches: sends, and the broker's own appends."""
