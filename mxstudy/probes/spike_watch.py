"""Watch a run's loss, notice a spike when it begins, and keep the data to examine it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mxstudy import config
from mxstudy.probes.base import StepView
from mxstudy.probes.outliers import FeatureRing
from mxstudy.probes.spikes import SpikeDetector


class SpikeWatch:
    """When a spike begins, keeps the last checkpoint before it and writes the ring of features to `folder`/spikes/.

    A quarter of the ring's steps later, it rewrites that file with the steps that followed, unless the run has ended.
    `pin` keeps the newest checkpoint and returns its name, None if there is none. `losses`: those of the run so far.
    """

    def __init__(
        self,
        settings: config.Spikes,
        ring: FeatureRing | None,
        folder: Path,
        pin: Callable[[], str | None],
        losses: Sequence[float] = (),
    ) -> None:
        self.detector = SpikeDetector(settings.window_steps, settings.threshold, losses)
        self.ring, self.folder, self.pin = ring, folder, pin
        self.unfinished: dict[int, int] = {}  # step at which a spike's file is rewritten -> step of the spike

    def look(self, view: StepView) -> dict[str, Any] | None:
        """Return the journal's row {"step", "spike": {loss, mean, std, ...}} if a spike begins at this step, else None.

        `ring` and `checkpoint` name the kept files, null if there was none to keep. A full disk does not stop the
        training: it is recorded in `ring_error` and `checkpoint_error`. If only the file's rewriting fails, the row of
        that later step has `ring_error`, and the file has the steps up to the spike.
        """
        row = self.rewritten(self.unfinished.pop(view.step)) if view.step in self.unfinished else {}
        spike = self.detector.see(view.loss, view.is_finite())
        if spike is not None:
            kept = self.keep("ring", lambda: self.write_ring(view.step)) | self.keep("checkpoint", self.pin)
            row["spike"] = spike._asdict() | kept
            if self.ring:
                self.unfinished[view.step + self.ring.after_steps] = view.step
        return {"step": view.step} | row if row else None

    def rewritten(self, spike: int) -> dict[str, Any]:
        """Write the file of the spike at step `spike` again. Return {} or, if that failed, {"ring_error": why}."""
        error = self.keep("ring", lambda: self.write_ring(spike)).get("ring_error")
        return {"ring_error": f"after the spike at step {spike}: {error}"} if error else {}

    def keep(self, what: str, keep: Callable[[], str | None]) -> dict[str, str | None]:
        try:
            return {what: keep()}
        except OSError as error:
            return {what: None, f"{what}_error": str(error)}

    def write_ring(self, step: int) -> str | None:
        if self.ring is None:
            return None
        name = f"spikes/step_{step:08d}.safetensors"
        self.ring.write(self.folder / name)
        return name
