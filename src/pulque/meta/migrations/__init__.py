"""How the database of the meta servers came to look as it does, one step per file."""
