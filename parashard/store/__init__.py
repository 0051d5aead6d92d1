"""The checkpoint store: named contents, created atomically, durably and at most once; incarnation claims."""

from parashard.store.base import Store as Store
from parashard.store.opening import open_store as open_store
