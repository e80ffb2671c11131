"""The routes of the administration API, one module per noun."""
