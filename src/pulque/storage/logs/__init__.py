"""The two logs that hold the truth, their segments, and the table of partitions."""
