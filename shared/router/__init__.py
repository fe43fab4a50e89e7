"""Router: forwards requests to replicas of a server, by cached prefix and load."""
