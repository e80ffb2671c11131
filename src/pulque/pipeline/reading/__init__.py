"""Read stored batches, from brokers or segment files, and decode them to Arrow columns."""
