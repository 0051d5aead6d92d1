"""The coordinator as a client of shards: its commands, and their monitoring."""
