"""What the conformance suite of starters has them start: `python -m starter_child VERB ... --lifeline N`, in no time.

exit CODE SAID...   print a line and end with that exit code
wait FILE           write our process id to FILE, then wait for the lifeline to close, or for a signal
deaf FILE           the same, and at SIGTERM write our process id to FILE.asked, and go on
save FILE SAVED     the same, and at SIGTERM add our name (the word after SAVED) to SAVED and end with 0
"""

import os
import signal
import sys
from itertools import takewhile


def _saved(path: str, name: str) -> None:
    with open(path, "a") as file:
        file.write(f"{name} ")
    os._exit(0)


def _up(path: str) -> None:
    with open(f"{path}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}.new", path)  # whoever sees it can read it


def main(verb: str, *words: str) -> None:
    """Do what the first word says."""
    lifeline = int(sys.argv[sys.argv.index("--lifeline") + 1])
    if verb == "exit":
        said = " ".join(takewhile(lambda word: not word.startswith("--"), words[1:]))
        os.write(1, f"{said}\n".encode())
        os._exit(int(words[0]))
    if verb == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: _up(f"{words[0]}.asked"))
    if verb == "save":
        signal.signal(signal.SIGTERM, lambda *_: _saved(words[1], words[2]))
    _up(words[0])
    while os.read(lifeline, 1):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
