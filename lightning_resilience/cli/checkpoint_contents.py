"""`lightning-resilience checkpoints show` and `consolidate`: the commands that need torch."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_resilience.checkpoint.audit import verify
from lightning_resilience.checkpoint.catalog import Listed
from lightning_resilience.checkpoint.consolidate import bytes_to_write, selected, write_checkpoint, write_safetensors
from lightning_resilience.checkpoint.contents import (
    MODEL,
    OPTIMIZERS,
    Contents,
    FileContents,
    ShardedContents,
    TensorEntry,
    Way,
)
from lightning_resilience.checkpoint.storage import LocalStorage, is_url
from lightning_resilience.cli import output
from lightning_resilience.errors import ConfigurationError, DamagedCheckpointError, UntrustedCheckpointError

_BLOCK = 8 << 20
_HYPER = "hyper_parameters"


# --- show --------------------------------------------------------------------------------------------------------


def show(listed: Listed, *, trust: bool, everything: bool, as_json: bool) -> None:
    """Tell what is in a checkpoint.

    Raises:
        UntrustedCheckpointError: It is one file, and holds objects that only ``trust`` allows.
    """
    with _opened(listed, trust) as contents:
        facts = _facts(listed, contents, trust)
        if as_json:
            output.show_json(facts)
            return
        for label, text in _lines(facts):
            output.say(f"{label:<17}{text}")
        rows = [
            [tensor["name"], str(tuple(tensor["shape"])), tensor["dtype"], output.size(tensor["bytes"])]
            for tensor in facts["tensors"]
            if everything or tensor["part"] == "model"
        ]
        output.say("")
        output.show_table(("tensor", "shape", "dtype", "size"), rows, right=("size",))


def _facts(listed: Listed, contents: Contents, trust: bool) -> dict[str, Any]:
    """Everything, as the keys of ``--json``."""
    refused = ""
    rest: dict[str, Any] = {}
    groups: list[list[dict[str, Any]]] = []
    try:
        rest = contents.rest(trust)
        groups = _groups(contents, trust)
    except UntrustedCheckpointError as error:
        refused = str(error)
    tensors = [_tensor(way, entry) for way, entry in contents.tensors.items()]
    parts = {part: [item for item in tensors if item["part"] == part] for part in _in_order(tensors)}
    return {
        "path": str(listed.place),
        "state": listed.state.value,
        "weights_only": listed.weights_only,
        "step": listed.step,
        "epoch": rest.get("epoch"),
        "time": listed.created_ns / 1e9,
        "bytes": listed.size,
        "ranks": listed.ranks,
        "lightning": rest.get("pytorch-lightning_version"),
        "parts": {part: _summary(items) for part, items in parts.items()},
        "optimizer_groups": groups,
        "schedulers": len(rest.get("lr_schedulers", [])),
        "callbacks": [str(name) for name in rest.get("callbacks", {})],
        "hyper_parameters": sorted(map(str, rest.get(_HYPER) or {})),
        "other": sorted(map(str, rest.keys() - _KNOWN)),
        "refused": refused or None,
        "tensors": tensors,
    }


_KNOWN = {"epoch", "global_step", "pytorch-lightning_version", "lr_schedulers", "callbacks", _HYPER, "loops"}


def _in_order(tensors: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(tensor["part"] for tensor in tensors))


def _tensor(way: Way, entry: TensorEntry) -> dict[str, Any]:
    if way[0] == MODEL:
        part, name = "model", str(way[1])
    elif way[0] == OPTIMIZERS:
        part, name = f"optimizer {way[1]}", ".".join(map(str, way[1:]))
    else:
        part, name = "other", ".".join(map(str, way))
    dtype = str(entry.dtype).removeprefix("torch.")
    return {"part": part, "name": name, "shape": list(entry.shape), "dtype": dtype, "bytes": entry.nbytes}


def _summary(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
    }


def _groups(contents: Contents, trust: bool) -> list[list[dict[str, Any]]]:
    """For each optimizer its groups, with the options that are plain values and the number of parameters."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for way, value in contents.values(trust).items():
        if way[0] != OPTIMIZERS or len(way) < 5 or way[2] != "param_groups":
            continue
        group = found.setdefault((int(way[1]), int(way[3])), {})
        if way[4] == "params":
            group["params"] = len(value) if isinstance(value, list) else 1
        elif len(way) == 5 and isinstance(value, (bool, int, float, str, list, tuple, type(None))):
            group[str(way[4])] = value
    optimizers = sorted({optimizer for optimizer, _ in found})
    return [[found[key] for key in sorted(found) if key[0] == optimizer] for optimizer in optimizers]


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "path", facts["path"]
    yield "state", facts["state"] + (", weights only" if facts["weights_only"] else "")
    yield "step", f"{facts['step']}" + ("" if facts["epoch"] is None else f", epoch {facts['epoch']}")
    yield "when", output.when(int(facts["time"] * 1e9))
    yield "size", output.size(facts["bytes"]) + (f", written by {facts['ranks']} rank(s)" if facts["ranks"] else "")
    yield "lightning", str(facts["lightning"] or "unknown")
    for part, summary in facts["parts"].items():
        dtypes = ", ".join(summary["dtypes"])
        text = (
            f"{summary['tensors']} tensors, {summary['elements']:,} elements, {output.size(summary['bytes'])}, {dtypes}"
        )
        yield part, text
    for number, groups in enumerate(facts["optimizer_groups"]):
        for group in groups:
            options = ", ".join(f"{key} {value}" for key, value in group.items() if key in ("lr", "weight_decay"))
            yield f"optimizer {number}", f"a group of {group.get('params', 0)} parameters: {options}"
    yield "schedulers", str(facts["schedulers"])
    yield "callbacks", ", ".join(facts["callbacks"]) or "none"
    yield "hyper-parameters", ", ".join(facts["hyper_parameters"]) or "none"
    if facts["other"]:
        yield "other", ", ".join(facts["other"])
    if facts["refused"]:
        yield "not read", f"{facts['refused']} For this command: --trust"


# --- consolidate -------------------------------------------------------------------------------------------------


def consolidate(
    listed: Listed, target: str, *, prefix: str, weights_only: bool, trust: bool, force: bool, as_json: bool
) -> None:
    """Write one plain file.

    Raises:
        ConfigurationError: The file cannot be written under that name.
        DamagedCheckpointError: The checkpoint does not hold what was written; there is no file then.
    """
    path = _target(target)
    with _opened(listed, trust, proven=True) as contents:
        tensors = selected(contents, prefix, optimizers=path.suffix != ".safetensors" and not weights_only)
        total = bytes_to_write(tensors)
        left_out = [str(way[1]) for way in contents.others if way[0] == MODEL and path.suffix == ".safetensors"]
        with output.progress(f"writing {path.name}", total) as advance:
            if path.suffix == ".safetensors":
                write_safetensors(path, contents, prefix, force=force, advance=advance)
            else:
                write_checkpoint(
                    path,
                    contents,
                    prefix,
                    weights_only=weights_only,
                    trust=trust,
                    step=listed.step or 0,
                    created_ns=listed.created_ns,
                    force=force,
                    advance=advance,
                )
    size = path.stat().st_size
    if as_json:
        made = {"output": str(path), "tensors": len(tensors), "bytes": size, "left_out": left_out}
        output.show_json({"path": str(listed.place), "step": listed.step, **made})
        return
    output.say(f"{listed.place} (step {listed.step}) -> {path}: {len(tensors)} tensors, {output.size(size)}")
    if left_out:
        output.say(f"left out, as they are no plain tensors: {', '.join(left_out)}")
    if listed.proof is None:
        output.say("it had no checksums: another tool wrote it")


def _target(target: str) -> Path:
    if is_url(target):
        raise ConfigurationError(f"{target!r} is a URL: write the file here and copy it there")
    path = Path(target).expanduser()
    if path.suffix not in (".ckpt", ".pt", ".pth", ".safetensors"):
        raise ConfigurationError(f"{target!r}: the name must end in .ckpt (for Lightning and torch) or .safetensors")
    return path


@contextlib.contextmanager
def _opened(listed: Listed, trust: bool, *, proven: bool = False) -> Iterator[Contents]:
    """The contents of a checkpoint; one file is verified first, if asked, and a remote one is fetched."""
    if listed.folder.is_dir():
        yield ShardedContents(listed, trust)
        return
    if proven:
        with output.progress("verifying", listed.size) as advance:
            faults = [fault for verdict in verify([listed], advance) for fault in verdict.faults]
        if faults:
            raise DamagedCheckpointError("; ".join(faults))
    with _local(listed) as path:
        yield FileContents(path, trust)


@contextlib.contextmanager
def _local(listed: Listed) -> Iterator[Path]:
    place = listed.place
    if isinstance(place.storage, LocalStorage):
        yield Path(place.path)
        return
    with tempfile.NamedTemporaryFile(suffix=".ckpt") as file, output.progress("fetching", listed.size) as advance:
        buffer = memoryview(bytearray(_BLOCK))
        done = 0
        while count := place.read_into(done, buffer[: min(_BLOCK, listed.size - done)]):
            file.write(buffer[:count])
            done += count
            advance(count)
        file.flush()
        yield Path(file.name)
