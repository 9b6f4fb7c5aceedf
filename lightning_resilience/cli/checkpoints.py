"""`lightning-resilience checkpoints ...`: where they are, whether they are good, and plain weights out of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from lightning_resilience.checkpoint.audit import Verdict, bytes_to_read, verify
from lightning_resilience.checkpoint.catalog import Listed, State, catalog, newest
from lightning_resilience.checkpoint.quarantine import Quarantine, forgive
from lightning_resilience.checkpoint.storage import Place, place_for
from lightning_resilience.cli import output
from lightning_resilience.errors import ConfigurationError, NoValidCheckpointError

_FINE, _DAMAGED = 0, 1


def add_commands(groups: Any) -> None:
    """Add this group to the command line."""
    group = groups.add_parser("checkpoints", help="list, verify, show, consolidate or prune checkpoints")
    commands = group.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "list", run_list, "what is there: step, time, size, state; no tensor is read")
    command = _add(commands, "verify", run_verify, "read every byte and compare it with its checksum")
    command.add_argument("--newest", action="store_true", help="only the one that a new start would use")
    command = _add(commands, "show", run_show, "what is in a checkpoint; no tensor is loaded")
    command.add_argument("--all", action="store_true", help="list the tensors of the optimizers too")
    _add_trust(command)
    command = _add(commands, "consolidate", run_consolidate, "write one plain file: .ckpt or .safetensors")
    command.add_argument("output", help="file to write; its ending, .ckpt or .safetensors, says which kind")
    command.add_argument("--weights-only", action="store_true", help=".ckpt without optimizers and callbacks")
    command.add_argument("--strip-prefix", default="", metavar="NAME.", help="only tensors of that name, without it")
    command.add_argument("--force", action="store_true", help="replace an existing file")
    _add_trust(command)
    command = _add(commands, "prune", run_prune, "delete what no policy keeps; never the only good one")
    command.add_argument("--keep-latest", type=int, metavar="N", help="keep those of the N steps committed last")
    command.add_argument("--keep-every", type=int, metavar="STEPS", help="keep the first at each multiple of STEPS")
    command.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    command.add_argument("--yes", action="store_true", help="delete without asking")


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=run)
    command.add_argument("path", help="a checkpoint, or a directory of them; local or a URL such as s3://bucket/run")
    command.add_argument("--json", action="store_true", help="one JSON object for machines")
    command.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the URL's file system (fsspec), such as anon=true; may be repeated",
    )
    return command


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trust", action="store_true", help="unpickle any object; it can run any code")


# --- list ----------------------------------------------------------------------------------------------------


def run_list(options: argparse.Namespace) -> int:
    """Exit code 1 where something is damaged or nothing is usable."""
    place = _place(options)
    found = catalog(place)
    first = newest(found)
    if options.json:
        output.show_json({"path": str(place), "checkpoints": [_as_json(item, first) for item in found]})
    elif not found:
        output.say(f"no checkpoints in {place}")
    else:
        columns = ("step", "when", "size", "ranks", "state", "name", "")
        output.show_table(columns, [_row(place, item, first) for item in found], right=("step", "size", "ranks"))
        for item in found:
            if item.state is State.DAMAGED:
                output.say(f"damaged: {item.fault}")
        quarantine = Quarantine()
        for item in found:
            if item.usable and (why := quarantine.why(item.place, item.created_ns)):
                output.say(f"passed over: {why}")
        output.say("Names and sizes were looked at, not contents: `verify` reads every byte.")
    return _DAMAGED if first is None or any(item.state is State.DAMAGED for item in found) else _FINE


def _as_json(item: Listed, first: Listed | None) -> dict[str, Any]:
    return {
        "path": str(item.place),
        "state": item.state.value,
        "weights_only": item.weights_only,
        "newest": item is first,
        "step": item.step,
        "time": item.created_ns / 1e9,
        "bytes": item.size,
        "ranks": item.ranks,
        "fault": item.fault or None,
    }


def _row(place: Place, item: Listed, first: Listed | None) -> list[str]:
    return [
        "" if item.step is None else str(item.step),
        output.when(item.created_ns),
        output.size(item.size),
        "" if item.ranks is None else str(item.ranks),
        _state(item),
        str(item.place).removeprefix(f"{place}/"),
        "<- newest" if item is first else "",
    ]


def _state(item: Listed) -> str:
    return f"{item.state.value}, weights only" if item.weights_only and item.usable else item.state.value


# --- verify --------------------------------------------------------------------------------------------------


def run_verify(options: argparse.Namespace) -> int:
    """Exit code 1 where something is damaged or nothing is whole."""
    place = _place(options)
    found = [item for item in catalog(place) if item.state is not State.UNFINISHED]
    if options.newest:
        found = [_newest_of(place, found)]
    with output.progress("verifying", bytes_to_read(found)) as advance:
        verdicts = verify(found, advance)
    if options.json:
        output.show_json({"path": str(place), "checkpoints": [_verdict_as_json(verdict) for verdict in verdicts]})
    elif not verdicts:
        output.say(f"no checkpoints in {place}")
    for verdict in verdicts:
        if verdict.proven and not verdict.faults and forgive(verdict.listed.place) and not options.json:
            output.say(f"{verdict.listed.place} had failed to load; it is whole now, and is used again")
    for verdict in () if options.json else verdicts:
        output.say(f"{_word(verdict)}  {verdict.listed.place}  ({output.size(verdict.bytes)} read)")
        for fault in verdict.faults:
            output.say(f"    {fault}")
    return _DAMAGED if not verdicts or any(verdict.faults for verdict in verdicts) else _FINE


def _word(verdict: Verdict) -> str:
    if verdict.faults:
        return "DAMAGED "
    return "whole   " if verdict.proven else "readable, no checksums (another tool wrote it)"


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": str(verdict.listed.place),
        "whole": not verdict.faults,
        "checksums": verdict.proven,
        "step": verdict.listed.step,
        "bytes": verdict.bytes,
        "faults": list(verdict.faults),
    }


# --- show, consolidate, prune: what they need is imported when they run ----------------------------------------


def run_show(options: argparse.Namespace) -> int:
    """What is in it."""
    from lightning_resilience.cli.checkpoint_contents import show  # imports torch

    place = _place(options)
    show(_newest_of(place, catalog(place)), trust=options.trust, everything=options.all, as_json=options.json)
    return _FINE


def run_consolidate(options: argparse.Namespace) -> int:
    """One plain file."""
    from lightning_resilience.cli.checkpoint_contents import consolidate  # imports torch

    place = _place(options)
    consolidate(
        _newest_of(place, catalog(place)),
        options.output,
        prefix=options.strip_prefix,
        weights_only=options.weights_only,
        trust=options.trust,
        force=options.force,
        as_json=options.json,
    )
    return _FINE


def run_prune(options: argparse.Namespace) -> int:
    """Delete what no policy keeps."""
    from lightning_resilience.cli.checkpoint_prune import prune

    return prune(
        _place(options),
        keep_latest=options.keep_latest,
        keep_every=options.keep_every,
        dry_run=options.dry_run,
        yes=options.yes,
        as_json=options.json,
    )


def _place(options: argparse.Namespace) -> Place:
    place = place_for(options.path, _storage_options(options.storage_option))
    if not place.exists():
        raise ConfigurationError(f"there is nothing at {place}")
    return place


def _storage_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Values are JSON where they can be, so that `anon=true` and `client_kwargs={...}` arrive as what they are."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigurationError("--storage-option: KEY=VALUE")  # without the value, which may be a secret
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _newest_of(place: Place, found: Sequence[Listed]) -> Listed:
    first = newest(list(found))
    if first is not None:
        return first
    quarantine = Quarantine()
    faults = "; ".join(fault for item in found if (fault := item.fault or quarantine.why(item.place, item.created_ns)))
    raise NoValidCheckpointError(f"there is no valid checkpoint at {place}{': ' if faults else ''}{faults}")
