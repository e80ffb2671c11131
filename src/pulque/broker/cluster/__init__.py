"""Connect a broker to its cluster: registration, routes, requests relayed to meta servers."""
