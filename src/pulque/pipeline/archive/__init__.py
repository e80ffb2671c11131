"""The archive: copy sealed segments into the tables of a lake, each message once."""
