"""The broker: server, settings and state; one package per step of a message's path."""
