"""Retraction: every component of a request out to a backend, and back into other units."""
