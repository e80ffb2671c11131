"""Where messages go: routes, partition selection, broker health. No I/O."""
