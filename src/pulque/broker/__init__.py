"""The data path, one file per step: receive, commit, pull, settle, retry."""
