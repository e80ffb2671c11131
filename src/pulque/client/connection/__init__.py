"""What both shells need to talk to one server: URL, handshake, request ids, back-off."""
