"""A prefill and a decode engine, their scheduler, and the processes they run in."""
