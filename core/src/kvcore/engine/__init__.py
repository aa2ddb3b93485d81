"""What an engine embeds: the cache, its steps, and its peers."""
