"""Where checkpoints and claims are kept: named contents that are created once, whole and durable, or not at all."""

from parashard.store.base import Store as Store
from parashard.store.opening import open_store as open_store
