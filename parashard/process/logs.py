"""structlog, imported without rich: every file has `from parashard.process.logs import structlog`.

structlog imports rich where it is installed, for a console renderer and for tracebacks that nothing here uses; that
takes longer than all the rest of structlog. While structlog is loaded, rich counts as not installed. Knows nothing of
how the log is written: `parashard.process.shell` configures that.
"""

from __future__ import annotations

import sys

__all__ = ["structlog"]

_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it now raises ImportError, which structlog expects
try:
    import structlog
finally:
    del sys.modules["rich"]
    if _rich is not None:
        sys.modules["rich"] = _rich
