"""The database of the meta servers: connection, tables, and the stores on top of them."""
