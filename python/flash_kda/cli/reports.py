"""The files of a report: <device>.md and .json beside a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flash_kda.cli import tables


@dataclass(frozen=True)
class Report:
    """What ``check`` and ``bench`` write, after every case: a run that is cut leaves its rows."""

    what: str
    device: str
    about: Mapping[str, str]  # what was measured where
    folder: Path | None  # None: nothing is written
    stem: str

    def text(self, body: str) -> str:
        return f"# {self.what}, {self.device}\n\n{tables.facts(self.about)}\n\n{body}\n"

    def finish(
        self,
        body: str,
        record: Mapping[str, object],
        caption: str,
        draw: Callable[[Path], None] | None,
    ) -> None:
        """``draw`` makes the picture; None: there is none."""
        if self.folder is None:
            return
        self.write(body, record)
        if draw is not None:
            draw(self.folder / f"{self.stem}.png")
            self.write(body, record, caption)
        pictures = "" if draw is None else ", .png"
        print(f"written to {self.folder.resolve()}: {self.stem}.md, .json{pictures}")

    def write(self, body: str, record: Mapping[str, object], caption: str | None = None) -> None:
        """``caption``: of the picture, which is there already; None while there is none."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        text = self.text(body)
        if caption is not None:
            text += f"\n![{caption}]({self.stem}.png)\n"
        (self.folder / f"{self.stem}.md").write_text(text, encoding="utf-8")
        whole = json.dumps({"about": self.about, **record}, indent=1)
        (self.folder / f"{self.stem}.json").write_text(whole, encoding="utf-8")
