"""The options, which are those of `torchrun`, and the plan they make."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Mapping
from typing import Any

from lightning_resilience.errors import ConfigurationError
from lightning_resilience.launcher.spec import Spec, command_of, only_one_node, outputs, rank_count

EPILOG = """exit codes:
  0    all ranks ended with 0; or the job was stopped by SIGTERM and --exit-zero-on-preempt was given
  1    a rank failed and restarts are used up
  2    the options cannot work as given
  130  interrupted (Ctrl-C)
  143  stopped by SIGTERM, to the launcher or to a rank that handles it

Every option can be given in the environment too: --max-restarts as PET_MAX_RESTARTS, and so on.
"""

_REFUSED = {
    "logs_specs": "--logs-specs",
    "numa_binding": "--numa-binding",
    "virtual_local_rank": "--virtual-local-rank",
    "run_path": "--run-path",
}


def add_options(parser: argparse.ArgumentParser, given: Mapping[str, str] = os.environ) -> None:
    """Add the options to a parser; what they do not say is taken from `PET_*` variables."""

    def add(*flags: str, default: Any = None, **options: Any) -> None:
        long = next(flag for flag in flags if flag.startswith("--"))
        dest = long[2:].replace("-", "_")
        value = given.get(f"PET_{dest.upper()}", default)
        if options.get("action") == "store_true":
            value = str(value).lower() in ("1", "true", "yes", "on")
        other = [f"--{dest}"] if "_" in dest else []
        parser.add_argument(*flags, *other, dest=dest, default=value, **options)

    add("--nnodes", default="1:1", metavar="N", help="nodes; only 1 so far")
    add("--nproc-per-node", default="1", metavar="N", help="ranks on this machine: a number, auto, gpu or cpu")
    add("--node-rank", default="0", metavar="R", help="of this node; only 0 so far")
    add("--standalone", action="store_true", help="accepted; one node is always alone")
    add("--rdzv-backend", default="static", metavar="NAME", help="accepted; one node needs none")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="accepted; one node needs none")
    add("--rdzv-id", default="none", metavar="ID", help="name of the job")
    add("--rdzv-conf", default="", metavar="K=V", help="accepted; one node needs none")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="where ranks meet")
    add("--master-port", default="0", metavar="PORT", help="the same; by default one that is free")
    add("--local-addr", default=None, metavar="HOST", help="accepted; one node needs none")
    add("--max-restarts", default="3", metavar="N", help="how often ranks may be started anew (default 3)")
    add("--monitor-interval", default="0", metavar="S", help="accepted; an exit is noticed at once")
    add("--start-method", default="spawn", metavar="NAME", help="accepted; each rank is a new process")
    add("--event-log-handler", default="null", metavar="NAME", help="accepted, and without effect")
    add("--role", default="default", metavar="NAME", help="stands before ranks in the console")
    add("--signals-to-handle", default="SIGTERM,SIGINT", metavar="S,S", help="accepted; SIGTERM, SIGINT, SIGHUP are")
    add("--shutdown-timeout", default=None, metavar="S", help="the same as --grace")
    add("--grace", default="30", metavar="S", help="seconds for ranks to end before they are killed (default 30)")
    add("--exit-zero-on-preempt", action="store_true", help="a stop after SIGTERM is a success")
    add("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    add("--no-python", action="store_true", help="the script is a program")
    add("--log-dir", default=None, metavar="DIR", help="where output goes that is redirected")
    add("-r", "--redirects", default="0", metavar="W", help="to files: 1 stdout, 2 stderr, 3 both; RANK:W,RANK:W")
    add("-t", "--tee", default="0", metavar="W", help="to files and the console; as --redirects")
    add("--local-ranks-filter", default="", metavar="R,R", help="only these in the console")
    add("--duplicate-stdout-filters", default="", metavar="T", help=argparse.SUPPRESS)
    add("--duplicate-stderr-filters", default="", metavar="T", help=argparse.SUPPRESS)
    add("--logs-specs", help=argparse.SUPPRESS)
    add("--numa-binding", help=argparse.SUPPRESS)
    add("--run-path", action="store_true", help=argparse.SUPPRESS)
    add("--virtual-local-rank", action="store_true", help=argparse.SUPPRESS)
    add("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument("script", help="what each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def spec_from(options: argparse.Namespace) -> Spec:
    """The plan.

    Raises:
        ConfigurationError: The options cannot work, alone or together.
    """
    for dest, flag in _REFUSED.items():
        if getattr(options, dest):
            raise ConfigurationError(f"{flag} is not supported by this launcher; torchrun has it")
    only_one_node(options.nnodes, options.node_rank)
    ranks = rank_count(options.nproc_per_node)
    grace = options.grace if options.shutdown_timeout is None else options.shutdown_timeout
    return Spec(
        command=command_of(options.script, options.arguments, module=options.module, no_python=options.no_python),
        ranks=ranks,
        run_id=uuid.uuid4().hex[:12] if options.rdzv_id == "none" else options.rdzv_id,
        master_addr=options.master_addr,
        master_port=int(_number("--master-port", options.master_port, most=65535)),
        max_restarts=int(_number("--max-restarts", options.max_restarts)),
        grace_s=_number("--grace", grace, whole=False),
        exit_zero_on_preempt=options.exit_zero_on_preempt,
        log_dir=options.log_dir,
        redirects=outputs("--redirects", options.redirects, ranks),
        tee=outputs("--tee", options.tee, ranks),
        shown=_ranks(options.local_ranks_filter, ranks),
        role=options.role,
        dry_run=options.dry_run,
    )


def _number(flag: str, text: str, *, whole: bool = True, most: float = 1e9) -> float:
    kind = "a whole number" if whole else "a number"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise ConfigurationError(f"{flag} {text}: {kind}, 0 or more") from None
    if not 0 <= value <= most:
        raise ConfigurationError(f"{flag} {text}: {kind}, 0 to {most:g}")
    return value


def _ranks(text: str, ranks: int) -> frozenset[int] | None:
    if not text:
        return None
    try:
        found = frozenset(map(int, text.split(",")))
    except ValueError:
        raise ConfigurationError(f"--local-ranks-filter {text}: numbers of ranks with commas") from None
    if not found <= frozenset(range(ranks)):
        raise ConfigurationError(f"--local-ranks-filter {text}: there are ranks 0 to {ranks - 1}")
    return found
