"""Settings: tables with keys, bounds and descriptions, as frozen values; and how they are checked and read."""
