"""The files of a delay server: scheduled messages, their dispatch, their index by id."""
