"""When a process must have saved and gone: told by the link of a campaign, or by SLURM, through the environment."""

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECENT = 20
ASSUMED_SAVE_S, ASSUMED_SAVE_SHARE = 60.0, 0.05
"""Taken for a save before the first one, the smaller of seconds and share of the link."""
MARGIN_S, MARGIN_SHARE = 30.0, 0.02


@dataclass(slots=True, kw_only=True)
class Deadline:
    """The end of this link, how long it is, and what has been measured of the phases that must fit before it."""

    end: float = float("inf")
    """Unix seconds, by this node's clock."""
    started: float = field(default_factory=time.time)
    """When the link began, before this process."""
    links_left: int | None = None
    """Links that may follow; None outside of a campaign."""
    stop_file: Path | None = None
    """Asks to stop as soon as it is there: works through containers and launchers, where signals may not."""
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    save_s: float | None = None
    """The longest save so far, to the complete checkpoint."""
    stall_s: float = 0.0
    """The longest that steps have waited for a save they did not stop for."""
    saving: bool = False
    """Whether a save is under way, which must end before another begins."""
    evaluate_s: float | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Deadline":
        """GATEWRIGHT_END_TIME and its like from a link; in other jobs SLURM_JOB_END_TIME, where SLURM sets it."""
        stop_file, links = environ.get("GATEWRIGHT_STOP_FILE"), environ.get("GATEWRIGHT_LINKS_LEFT")
        end = environ.get("GATEWRIGHT_END_TIME") or environ.get("SLURM_JOB_END_TIME")
        return cls(
            end=float(end) if end else float("inf"),
            started=float(environ.get("GATEWRIGHT_LINK_STARTED") or time.time()),
            links_left=int(links) if links else None,
            stop_file=Path(stop_file) if stop_file else None,
        )

    @property
    def link_s(self) -> float:
        """Length of this link."""
        return self.end - self.started

    @property
    def lead_s(self) -> float:
        """So long before the end the last step must be over: the longest phase between two looks at the clock, twice a
        save, one more that is under way, and a margin."""
        save_s = min(ASSUMED_SAVE_S, ASSUMED_SAVE_SHARE * self.link_s) if self.save_s is None else self.save_s
        return max(self.recent_s, default=0.0) + (2 + self.saving) * save_s + min(MARGIN_S, MARGIN_SHARE * self.link_s)

    def step_took(self, seconds: float) -> None:
        self.recent_s.append(seconds)

    def save_took(self, seconds: float, *, stall_s: float) -> None:
        self.save_s = max(seconds, self.save_s or 0.0)
        self.stall_s = max(stall_s, self.stall_s)

    def evaluation_took(self, seconds: float) -> None:
        self.evaluate_s = seconds

    def asked(self) -> str | None:
        """Why to stop at once: the stop file is there."""
        return "stop file" if self.stop_file is not None and self.stop_file.exists() else None

    def near(self, now: float | None = None) -> str | None:
        """Why to stop before another step: it might not fit."""
        left_s = self.end - (time.time() if now is None else now)
        return f"time limit in {left_s:.0f} s" if left_s < self.lead_s else None
