"""One worker process on one device: lease, pull, gradient, push."""
