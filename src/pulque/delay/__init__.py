"""The delay server: holds messages until they are due, then sends them to a broker."""
