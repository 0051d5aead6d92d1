"""The coordinator's interfaces: its gRPC service, its status and status page, its metrics."""
