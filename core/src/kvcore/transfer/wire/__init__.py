"""The sockets, and the thread that serves them."""
