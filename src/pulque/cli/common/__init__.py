"""Parts that commands share: options, output, exit codes, durations, the HTTP client."""
