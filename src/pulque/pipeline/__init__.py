"""The data pipeline: history in a lake, read and written with Spark. Brokers never need it."""
