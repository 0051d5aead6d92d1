"""What a shard decides: which pushes count, when they are applied, and what it counts of itself. All pure."""
