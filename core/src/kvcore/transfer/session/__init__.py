"""Sessions: what a sender and a receiver do with a message, without I/O, clock or thread of their own."""
