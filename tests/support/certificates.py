"""Folders of certificates for tests, right and wrong, each made once a session."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from parashard.security.certs import issue, make_authority
from parashard.security.credentials import Credentials
from parashard.security.identity import Identity, Role

RIGHT, WRONG_CA, EXPIRED, NONE = "right", "wrong-CA", "expired", "none"
BAD = (WRONG_CA, EXPIRED, NONE)
LONG_AGO = datetime.now(UTC) - timedelta(days=30)


class Certificates:
    """A trusted authority, an untrusted one, and folders with certificates of theirs."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "authority"
        self._untrusted = folder / "untrusted"
        self._folder = folder
        make_authority(self.authority, valid_days=365)
        make_authority(self._untrusted, valid_days=365)

    def folder(self, roles: Role | Sequence[Role], kind: str = RIGHT) -> Path:
        """Return a folder whose certificate has these roles; with WRONG_CA or EXPIRED no server may accept it."""
        roles = [roles] if isinstance(roles, Role) else list(roles)
        folder = self._folder / kind / "-".join(roles)
        if not folder.exists():
            self.renew(folder, roles, kind)
        return folder

    def renew(self, folder: Path, roles: Sequence[Role], kind: str = RIGHT, valid_days: int = 1) -> None:
        """Put a new certificate into a folder."""
        identities = [Identity(role, f"{role}-0") for role in roles]
        authority = self._untrusted if kind == WRONG_CA else self.authority
        issue(authority, folder, identities, valid_days=valid_days, now=LONG_AGO if kind == EXPIRED else None)
        shutil.copy(self.authority / "ca.pem", folder / "ca.pem")  # it trusts the servers in any case

    def of(self, *roles: Role) -> Credentials:
        """Return the credentials of a process with these roles."""
        return Credentials(self.folder(roles))
