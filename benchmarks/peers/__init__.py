"""Peers that parashard is raced against: a program for each, which runs in an environment and processes of its own."""
