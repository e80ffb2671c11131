"""Read and verify a data directory without a broker; write nothing."""
