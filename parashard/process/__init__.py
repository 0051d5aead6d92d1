"""Infrastructure of a service process: arguments, signals, logging, threads, failpoints, writes that may fail."""
