"""Read and verify stored batches, and search them by tag."""
