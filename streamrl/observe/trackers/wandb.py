"""Weights & Biases: online where a key is found, else files below ``RUN/wandb`` that ``wandb sync`` sends later."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from streamrl.base.run_events import CompletionSampled
from streamrl.observe.trackers.tracker import RunInfo, Tracker, sample_table

log = logging.getLogger(__name__)

_LONGEST = 8000


class Wandb(Tracker):
    """Metrics have the axis ``step``, which is a metric: wandb's own step must rise, and an evaluation that ends later
    than its step would be dropped. Lines of the last ten seconds before a kill come twice."""

    lag_s = 10.0  # it has a process of its own, and no flush

    def open(self, run: RunInfo) -> None:
        import wandb

        self._wandb = wandb
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True
        )  # else it takes stdout and uploads code
        begin = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT") or run.project,
            id=run.run_id,
            name=run.run_id,
            dir=str(run.directory),
            resume="allow",
            tags=run.tags,
            config=run.recipe,
            settings=settings,
        )
        try:
            self._run: Any = begin(mode=mode)
        except wandb.errors.CommError as error:
            log.warning("wandb cannot be reached (%s): it writes files, which wandb sync sends later", error)
            self._run = begin(mode="offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        """A table of its own each time: one that grows keeps every row in memory, and the functions of the first."""
        heads, table = sample_table(step, rows)
        cells = [[cell[:_LONGEST] if isinstance(cell, str) else cell for cell in row] for row in table]
        table = self._wandb.Table(columns=heads, data=cells, allow_mixed_types=True)
        self._run.log({"step": step, f"samples/{kind}": table})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        made = {f"histogram/{name}": self._wandb.Histogram(list(column)) for name, column in values.items()}
        self._run.log({"step": step, **made})

    def event(self, step: int, kind: str, text: str) -> None:
        self._run.log({"step": step, f"event/{kind}": text})

    def close(self) -> None:
        self._run.finish()
