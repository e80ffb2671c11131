"""The report: throughput, latency and failures, as tables or as one HTML page."""
