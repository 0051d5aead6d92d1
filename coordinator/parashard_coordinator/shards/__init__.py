"""The coordinator as a client of shards: its commands to them, and their monitoring."""
