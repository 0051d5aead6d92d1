"""A shard's decisions: which pushes count, when they are applied; and its counters. All pure."""
