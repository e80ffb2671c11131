"""Store waiting messages by the tick they are due in: schedule logs, dispatch logs, indexes."""
