"""parashard: a parameter server for training on machines that come and go."""

import os

__version__ = "0.1.0"

# gRPC reads this when it is imported: without threads of its own for polling (EventEngine, in Python since 2026) a call
# is sooner answered (docs/decisions/0025). A setting of the user's stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
