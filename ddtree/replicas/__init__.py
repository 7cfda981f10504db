"""Several engine processes behind one address: the proxy, the supervisor, and what all of them say together."""
