"""Bugs to plant in decoders, one check taken away at a time, to see that the fuzzer finds them.

``python campaigns/fuzz/campaign.py --planted`` runs them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from campaigns.fuzz.bombs import bombs
from campaigns.fuzz.execution import Fault, Target, run_one, run_slice


class Bug(msgspec.Struct, frozen=True):
    """``old`` in the source of ``module`` becomes ``new``; ``target`` must find it."""

    target: str
    module: str
    old: str
    new: str


BUGS = (
    Bug("streams.items", "comm.wire", "        if code not in ARRAY_ITEM_SIZES:\n", "        if False:\n"),
    Bug("streams.items", "comm.wire", "or index >= len(self._incoming)", ""),
    Bug(
        "streams.items",
        "comm.wire",
        '        except UNDECODABLE as error:\n            raise WireError(f"not a',
        '        except msgspec.MsgspecError as error:\n            raise WireError(f"not a',
    ),
    Bug("streams.items", "comm.wire", "if growth and takes_more(", "if False and takes_more("),
    Bug(
        "streams.conversation",
        "comm.stream_protocol",
        "        elif self.received - self.taken >= self.window:\n",
        "        elif False:\n",
    ),
    Bug(
        "streams.conversation",
        "comm.stream_protocol",
        "except (IndexError, *UNDECODABLE) as error",
        "except UNDECODABLE as error",
    ),
    Bug(
        "streams.conversation",
        "comm.stream_protocol",
        "        if header.sequence != self.received:\n",
        "        if header.sequence < self.received:\n",
    ),
    Bug(
        "streams.control",
        "comm.control_protocol",
        "hmac.compare_digest(request.key.encode(), key.encode())",
        "hmac.compare_digest(request.key, key)",
    ),
    Bug(
        "streams.telemetry", "comm.telemetry", "except (KeyError, *UNDECODABLE) as error", "except UNDECODABLE as error"
    ),
    Bug(
        "weights.announcement",
        "weights.requests",
        "except UNDECODABLE as error",
        "except msgspec.MsgspecError as error",
    ),
    Bug(
        "weights.requests",
        "weights.publish.server",
        "if not 0 <= request.chunk < len(part.chunks):",
        "if request.chunk < 0:",
    ),
    Bug(
        "weights.replies",
        "weights.pull.received_part",
        "if actual != expected.digest or len(frame) != expected.payload_bytes:",
        "if len(frame) != expected.payload_bytes:",
    ),
    Bug("weights.manifest", "weights.manifest", "if len(self.shape) > MOST_SIDES or min(", "if min("),
    Bug(
        "weights.manifest",
        "weights.manifest",
        "    most = min(MANIFEST_LIMIT, _UNFOLDED_AT_LEAST + _UNFOLDED_TIMES * len(encoded))\n",
        "    most = 1 << 40\n",
    ),
    Bug("weights.patches", "weights.codec.codec", "    if header.elements != count:\n", "    if False:\n"),
    Bug(
        "weights.patches",
        "weights.codec.codec",
        "        if steps.max() == (1 << (8 * bits.itemsize)) - 1:\n",
        "        if False:\n",
    ),
    Bug("weights.patches", "weights.codec.codec", "        if reached > sizes[index]:\n", "        if False:\n"),
    Bug("weights.symbols", "weights.codec.symbols", "if ends.size != count or", "if"),
    Bug(
        "weights.symbols",
        "weights.codec.symbols",
        "    if symbols.max() > np.iinfo(dtype).max:\n",
        "    if False:\n",
    ),
    Bug(
        "weights.node_state",
        "weights.pull.node_mirror",
        "    except UNDECODABLE as error:\n",
        "    except msgspec.MsgspecError as error:\n",
    ),
    Bug("rewards.call_answers", "rewards.calls.frames", "    if len(answer.values) != count:\n", "    if False:\n"),
    Bug(
        "rewards.call_answers",
        "rewards.calls.frames",
        "    except UNDECODABLE as error:\n",
        "    except msgspec.MsgspecError as error:\n",
    ),
    Bug(
        "rewards.zygote",
        "sandbox.sandbox",
        "    except UNDECODABLE as error:\n",
        "    except msgspec.MsgspecError as error:\n",
    ),
    Bug("rewards.code", "sandbox.sandbox", "    except MALFORMED as error:", "    except ValueError as error:"),
    Bug(
        "rewards.cases",
        "sandbox.cases",
        "if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(",
        "if len(",
    ),
    Bug(
        "rewards.inspections", "rewards.inspect", "        except UNDECODABLE:", "        except msgspec.MsgspecError:"
    ),
    Bug(
        "files.rewards",
        "rewards.kept_rewards",
        "    except UNDECODABLE as error:\n",
        "    except (msgspec.MsgspecError, UnicodeDecodeError) as error:\n",
    ),
    Bug(
        "files.topology",
        "config.topology",
        "    except UNDECODABLE as error:\n",
        "    except msgspec.MsgspecError as error:\n",
    ),
    Bug(
        "user.recipe",
        "config.load",
        "    except (ValueError, RecursionError) as error:  # tomllib",
        "    except RecursionError as error:  # tomllib",
    ),
    Bug(
        "user.overrides",
        "config.load",
        "    except (OSError, ValueError, RuntimeError) as error:",
        "    except OSError as error:",
    ),
    Bug(
        "user.arrow",
        "stages.prompt_tables",
        "            row.validate(full=True)  # offsets of a broken file lead beyond its end\n",
        "",
    ),
    Bug(
        "user.safetensors",
        "config.model_facts",
        "length > min(LARGEST_SAFETENSORS_HEADER, size - 8)",
        "length > 1 << 62",
    ),
    Bug(
        "user.model_config",
        "config.model_facts",
        "    if not isinstance(value, int) or not 0 <= value <= _LARGEST_SIZE:\n",
        "    if False:\n",
    ),
    Bug(
        "user.tokenizer",
        "tokenizer",
        "    except (OSError, LookupError, TypeError, ValueError) as error:",
        "    except OSError as error:",
    ),
)


def find(bug: Bug, targets: Mapping[str, Target], executions: int) -> Fault | None:
    """The fault that the fuzzer finds when the bug is there; None: it finds none. Large inputs come first."""
    module = importlib.import_module(f"streamrl.{bug.module}")
    target, planted = targets[bug.target], False

    def run(frames: Sequence[bytes]) -> str:  # in a process of its own
        nonlocal planted
        if not planted:
            _plant(module, bug.old, bug.new)
            planted = True
        return target.run(frames)

    with_bug = msgspec.structs.replace(target, run=run)
    for name, _, frames in bombs():
        if name == bug.target and (fault := run_one(with_bug, frames).fault) is not None:
            return fault
    return run_slice(with_bug, 0, executions).fault


def _plant(module: ModuleType, old: str, new: str) -> None:
    """Give every function of ``module`` the code that it has in the changed source."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    if source.count(old) != 1:
        raise LookupError(f"{old!r} is in {module.__name__} {source.count(old)} times")
    changed = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed)
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == module.__name__:
            _graft(value, changed.get(name))
        elif isinstance(value, tuple) and isinstance(changed.get(name), tuple):
            setattr(module, name, changed[name])


def _graft(value: Any, changed: Any) -> None:
    if isinstance(value, staticmethod | classmethod):
        _graft(value.__func__, changed.__func__)
    elif isinstance(value, FunctionType) and isinstance(changed, FunctionType):
        inner = getattr(value, "__wrapped__", None)
        if inner is not None:
            _graft(inner, changed.__wrapped__)  # type: ignore[attr-defined]
        else:
            value.__code__ = changed.__code__
    elif isinstance(value, type) and isinstance(changed, type):
        for name, member in vars(value).items():
            if name in vars(changed):
                _graft(member, vars(changed)[name])
