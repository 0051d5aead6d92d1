"""Models: the built-in ones, the test oracles, and users' own."""
