"""The flags of a server, and the rules of what does not go together."""
