"""How others reach the coordinator: its gRPC service, its status and status page, its metrics."""
