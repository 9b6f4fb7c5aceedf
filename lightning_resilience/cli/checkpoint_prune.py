"""`lightning-resilience checkpoints prune`: what is deleted, and that something good is left."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_resilience.checkpoint.audit import verify
from lightning_resilience.checkpoint.catalog import Listed, State, catalog, committed, linked
from lightning_resilience.checkpoint.retention import KeepEvery, KeepLatest, KeepPolicy, doomed
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.cli import output
from lightning_resilience.errors import ConfigurationError, NoValidCheckpointError


def prune(
    place: Place, *, keep_latest: int | None, keep_every: int | None, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Delete the committed checkpoints in a directory that no policy keeps.

    Damaged, unfinished and foreign ones are neither counted nor deleted, and neither is one that a link names.

    Raises:
        ConfigurationError: No policy was given, nobody is there to be asked, or it is not a directory of checkpoints.
        NoValidCheckpointError: Of what would be kept, no checkpoint is whole: nothing was deleted.
    """
    policies = _policies(keep_latest, keep_every)
    found = catalog(place)
    if place.is_file() or any(item.place.path == place.path for item in found):
        raise ConfigurationError(f"{place} is not a directory of checkpoints: pass the directory it is in")
    going = {item.path for item in doomed(committed(found), policies, spared=linked(place))}
    goes = [item for item in found if str(item.place) in going]
    if not dry_run and goes:
        _check_what_stays(place, [item for item in found if item.usable and item not in goes])
        if not yes and not _agreed(goes, as_json):
            return 2
        for item in goes:
            item.place.delete()
    _report(found, goes, dry_run, as_json)
    return 0


def _policies(keep_latest: int | None, keep_every: int | None) -> list[KeepPolicy]:
    policies: list[KeepPolicy] = []
    if keep_latest is not None:
        policies.append(KeepLatest(keep_latest))
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    if not policies:
        raise ConfigurationError("say what to keep: --keep-latest N, --keep-every STEPS, or both")
    return policies


def _check_what_stays(place: Place, stays: Sequence[Listed]) -> None:
    """Names and sizes can be right where bytes are not, so the newest that stays is read."""
    stays = [item for item in stays if item.state is State.COMMITTED and not item.weights_only] or list(stays)
    with output.progress("verifying what stays", stays[0].size if stays else 0) as advance:
        verdicts = verify(stays[:1], advance)
    faults = "; ".join(fault for verdict in verdicts for fault in verdict.faults)
    if faults or not verdicts:
        raise NoValidCheckpointError(
            f"nothing was deleted from {place}: the newest that would stay is not whole ({faults or 'there is none'})."
            " Move it away, and prune again"
        )


def _agreed(goes: Sequence[Listed], as_json: bool) -> bool:
    if as_json or not output.is_terminal():
        raise ConfigurationError(f"{len(goes)} checkpoint(s) would be deleted: pass --yes, or --dry-run to see which")
    for item in goes:
        output.say(f"  step {item.step}  {output.size(item.size)}  {item.place}")
    return output.confirm(f"Delete these {len(goes)} ({output.size(sum(item.size for item in goes))})?")


def _report(found: Sequence[Listed], goes: Sequence[Listed], dry_run: bool, as_json: bool) -> None:
    stays = [item for item in found if item.usable and item not in goes]
    if as_json:
        deleted, kept = [str(item.place) for item in goes], [str(item.place) for item in stays]
        output.show_json({"dry_run": dry_run, "deleted": deleted, "kept": kept})
        return
    for item in goes:
        output.say(f"{'would delete' if dry_run else 'deleted'}  {item.place}")
    size = output.size(sum(item.size for item in goes))
    output.say(f"{len(goes)} checkpoint(s), {size}; {len(stays)} stay")
