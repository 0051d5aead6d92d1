"""Write the dashboards' JSON files, or with --check tell whether they are up to date.

    python -m deploy.grafana.dashboards [--check]

Owns the folder `deploy/grafana/dashboards`. What the dashboards show is in `deploy.grafana.contents`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deploy.grafana.contents import DASHBOARDS
from deploy.grafana.layout import dashboard_json

FOLDER = Path(__file__).resolve().parent / "dashboards"


def main() -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    if parser.parse_args().check:
        old = sorted(name for name, content in wanted().items() if present().get(name) != content)
        old += sorted(present().keys() - wanted().keys())
        if old:
            sys.stderr.write(f"not up to date: {', '.join(old)}; run python -m deploy.grafana.dashboards\n")
        return 1 if old else 0
    for name in present().keys() - wanted().keys():
        (FOLDER / name).unlink()
    for name, content in wanted().items():
        (FOLDER / name).write_text(content)
    return 0


def wanted() -> dict[str, str]:
    """Return what each file should hold."""
    return {
        f"{dashboard.uid.removeprefix('parashard-')}.json": json.dumps(dashboard_json(dashboard), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }


def present() -> dict[str, str]:
    """Return what each file holds."""
    return {path.name: path.read_text() for path in FOLDER.glob("*.json")}


if __name__ == "__main__":
    sys.exit(main())
