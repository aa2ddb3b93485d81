"""The command line: commands are registered, this finds and runs them."""
