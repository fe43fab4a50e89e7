"""Types, limits and errors of the HTTP API."""
