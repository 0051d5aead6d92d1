"""The command line. A command parses, calls and prints; it decides nothing."""
