"""Ordered groups: allot partitions to consumers, and watch closed partitions drain."""
