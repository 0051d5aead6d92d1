"""One shard process: storage, optimizer kernels, applied steps, the gRPC service around them."""
