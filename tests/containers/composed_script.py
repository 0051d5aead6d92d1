"""ComposedScript: the compose file of scripts brought up by podman-compose, with a script in a folder of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from composed_job import ComposedJob, eventually
from container_engine import ROOT


class ComposedScript(ComposedJob):
    """One project of podman-compose, of a script.

    Parameters
    ----------
    image : str
        Runs as every service.
    folder : Path
        Gets the script, `train.py`; containers read it, as /job.
    text, words : str
        The script and its arguments.
    workers : int
        How many.
    """

    _file = ROOT / "deploy" / "script" / "compose.yaml"

    def __init__(self, image: str, folder: Path, text: str, words: str, *, workers: int) -> None:
        self._image = image
        self.project = "parashard-test-script"
        folder.chmod(0o755)  # the containers' user reads it
        (folder / "train.py").write_text(text)
        self._environment = {
            **os.environ,
            "PARASHARD_IMAGE": image,
            "PARASHARD_SCRIPT_FOLDER": str(folder),
            "PARASHARD_SCRIPT": f"train.py {words}",
            "PARASHARD_WORKERS": str(workers),
            "PARASHARD_STATUS_PORT": "",  # whatever is free
            "PARASHARD_GIVE_UP_S": "120",  # of a worker that was just starting as the script ended
        }

    def up_again(self) -> None:
        """Bring up what does not run."""
        self._certify()
        self._start("train", "worker")

    def wait_for_steps(self, steps: int, workers: int) -> None:
        """Wait until so many steps are complete and so many workers are there."""
        said = [""]

        def so_far() -> bool:
            asked = self.ask("train_1", "parashard", "status", "--json")
            said[:] = [asked.stdout + asked.stderr]
            if asked.returncode != 0:
                assert self.container("train_1")["RestartCount"] <= 1, self.log("train_1")
                return False  # it is starting
            status = json.loads(asked.stdout)
            if "steps_complete" not in status:
                return False  # it has been stopped: this is its report
            live = sum(worker["live"] for worker in status["workers"])
            return int(status["steps_complete"]) >= steps and live >= workers

        eventually(so_far, f"{steps} steps are complete", told=lambda: f"{said[-1]}\n{self.log('train_1')}")

    def output(self) -> list[str]:
        """Wait until the script has ended well, and return the lines that it has printed."""

        def ended() -> bool:
            return self.container("train_1")["State"]["Status"] == "exited"

        eventually(ended, "the script has ended", told=lambda: self.log("train_1"))
        assert self.container("train_1")["State"]["ExitCode"] == 0, self.log("train_1")
        return self.log("train_1").splitlines()
