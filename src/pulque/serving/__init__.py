"""What brokers and delay servers have in common: a log, its group commit, their meta servers."""
