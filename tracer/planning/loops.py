"""The graph loops that builds were learnt to have, kept by build id for the next recording."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tracer.probes.learning import LearntLoop
from tracer.recording.paths import Owner
from tracer.recording.user_files import read_text


@dataclass(frozen=True)
class KeptLoops:
    """A folder of the user's with a file for each build."""

    folder: Path

    @classmethod
    def of(cls, owner: Owner) -> "KeptLoops":
        """A user's."""
        return cls(owner.cache() / "loops")

    def known(self) -> list[LearntLoop]:
        """All of them; files that cannot be read or are damaged are left out."""
        found, names = [], list[str]()
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".loop"))
        for name in names:
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(LearntLoop(**json.loads(read_text(self.folder / name))))
        return found

    def keep(self, loop: LearntLoop) -> None:
        """Keep another one; where the folder cannot be written, the next recording learns it again."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{loop.id}.loop").write_text(json.dumps(asdict(loop)))
