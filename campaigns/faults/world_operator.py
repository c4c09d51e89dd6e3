"""The operator of the run: starts it as ``streamrl train`` does, looks at how each of its lives ended, and calls
``streamrl resume`` until it has made all of its steps. What a life may end of is judged here."""

from __future__ import annotations

from campaigns.faults.fault_plan import ENDS_RUNS, Phase
from campaigns.faults.simulated_machine import Machine
from campaigns.faults.world_faults import Faults
from campaigns.faults.world_state import WorldState
from streamrl.base.run_events import RunFinished, RunResumed
from streamrl.launch.pipeline import Pipeline
from streamrl.recipe.topology import JOURNAL_DIRECTORY

PARENT = "parent"
REFUSED = {"refuse_delta", "corrupt_delta"}
DELAYS = {"hang", "slow", "partition", "latency", "slow_flush"}


class Operator:
    """``lives``: how often the run was started; ``result``: kind and message of how it ended for good;
    ``asked_to_stop``: in this life."""

    def __init__(self, world: WorldState, machine: Machine, faults: Faults) -> None:
        self.result: tuple[str, str] | None = None
        self.lives = 0
        self._world = world
        self._machine = machine
        self._faults = faults
        self._pipeline: Pipeline | None = None
        self.asked_to_stop = False
        self._faults_before = 0

    def start(self) -> None:
        """A life of the run. It goes on from its journal, if it came to have one."""
        world = self._world
        resumes = (world.directory / "run" / JOURNAL_DIRECTORY).is_dir()
        self.lives += 1
        self.asked_to_stop, self._faults_before = False, len(self._faults.fired)
        self._faults.over(Phase.START)
        self._faults.begin(Phase.START)
        world.progressed()

        async def main() -> int:
            kind, message = await self._live(resumes)
            world.loop.call_soon(self._ended, kind, message, context=world.context)
            return 0

        self._machine.spawn(PARENT, main)

    def ask_to_stop(self) -> bool:
        """Ctrl-C, once."""
        if self.asked_to_stop or self._pipeline is None or self._machine.living(PARENT) is None:
            return False
        self.asked_to_stop = True
        self._pipeline.drain()
        return True

    def let_go(self) -> None:
        """The world is over: what is not closed must be gone while nobody is warned of it."""
        self._pipeline = None

    def kill_everything(self) -> bool:
        """SIGKILL to all at once; a while later it is resumed."""
        if self._machine.living(PARENT) is None:
            return False
        for popen in list(self._machine.lives.values()):
            popen.kill()
        self._again()
        return True

    async def _live(self, resumes: bool) -> tuple[str, str]:
        world, reason = self._world, ""
        self._pipeline = None
        try:
            pipeline = Pipeline.of_run(world.directory / "run") if resumes else Pipeline(world.recipe)
            async with pipeline:
                self._pipeline = pipeline
                async for event in pipeline.events():
                    world.note("told", type(event).__name__)
                    if isinstance(event, RunResumed):
                        self._faults.over(Phase.START)
                    if isinstance(event, RunFinished):
                        reason = event.reason
        except Exception as error:  # noqa: BLE001 - how a run fails is what is looked at
            return "failed", f"{type(error).__name__}: {error}"
        if not reason:
            return ("drained" if self.asked_to_stop else "silent"), reason
        return ("drained" if reason == "drained" else "finished"), reason

    def _ended(self, kind: str, message: str) -> None:
        world = self._world
        world.note("life over", kind, message.splitlines()[0] if message else "")
        self._faults.over(Phase.DRAIN)
        if kind == "drained" and world.ledger.max_version == world.recipe.run.steps:
            kind = "finished"  # it was asked to stop when all was done
        left = [name for name, popen in self._machine.lives.items() if popen.code is None and name != PARENT]
        if left:
            world.ledger.violated("residue", f"the run has ended ({kind}) and left {', '.join(left)} behind")
        self._judge(kind, message)
        if kind == "finished" or world.ledger.violations:
            self.result = kind, message
            world.end()
        else:
            self._again()

    def _again(self) -> None:
        world = self._world
        self._pipeline = None
        world.loop.call_later(world.random.uniform(0.5, 5.0), self.start, context=world.context)

    # ---- what may be ---------------------------------------------------------------------------------

    def judge_end(self) -> None:
        """The world is over."""
        world = self._world
        if self.result is None or world.ledger.violations:
            return
        kind, message = self.result
        if kind == "stuck":
            world.ledger.violated("progress", f"the run is stuck: {message}")
        elif message not in ("finished", "drained"):
            world.ledger.check_end(None)  # it ended because nothing is left to draw
        else:
            world.ledger.check_end(world.recipe.run.steps)

    def _judge(self, kind: str, message: str) -> None:
        """A life of the run is over."""
        ledger = self._world.ledger
        fired = self._faults.fired[self._faults_before :]
        kinds = {cell.split("/")[1] for cell in fired}
        if kind == "drained" and not self.asked_to_stop:
            ledger.violated("progress", "the run ended as if it had been asked to, and nobody did")
        if kind == "silent":
            ledger.violated("blame", "the run ended and did not say why")
        if kind != "failed":
            return
        if not message.partition(":")[2].strip():
            ledger.violated("blame", f"the run failed and does not say why: {message!r}")
        elif "StreamBroken" in message and kinds & DELAYS:
            pass  # the first cause was too late to be seen: what followed from it was blamed
        elif not any(suspect in message for suspect in (*self._faults.suspects, "disk", "journal")):
            ledger.violated("blame", f"nothing was done to what the run blames: {message}")
        elif self._world.recipe.run.restarts and not kinds & ENDS_RUNS:
            ledger.violated("progress", f"restarts are allowed, and the run failed: {message}")
        elif sum(cell.split("/")[1] in REFUSED for cell in fired) > 1:
            pass  # an engine that refuses a version as delta and as anchor, too
        elif not any(fault.ends_something for fault in self._faults.plan if fault.cell in fired):
            ledger.violated("progress", f"no fault that ends anything fired, and the run failed: {message}")
