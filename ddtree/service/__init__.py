"""Life under systemd: what it is told, and the unit that it runs."""
