"""What every service process has: arguments, signals, log, threads, failpoints, writes that may fail."""
