"""The Spark data source `pulque`: reads and writes, as batches and as streams."""
