"""Says what this machine, or a Ray cluster, can measure: `python -m ep_ray.doctor`.

    python -m ep_ray.doctor [--address auto|HOST:PORT] [--json]
    python -m ep_ray.doctor load [--quick] [--json]

`load` measures what the load client and the router themselves add on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from ep_ray.config.errors import ConfigError
from ep_ray.watchdog import TrialError

HEALTHY, UNHEALTHY = 0, 1
_REPEATS, _QUICK_REPEATS = 5, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0 if at least one measure can run and nothing is broken, or if the client holds the pace;
        else 1.
    """
    args = _parser().parse_args(argv)
    return _load(args) if args.what == "load" else _machine(args)


def _machine(args: argparse.Namespace) -> int:
    # These look up, and torch comes with them: `--help` needs neither.
    from sweeps.doctor.diagnosis import diagnose
    from sweeps.doctor.node import examine, examine_cluster
    from sweeps.doctor.text import sections
    from sweeps.render_text import print_report

    try:
        nodes = examine_cluster(args.address) if args.address else [examine()]
    except (ConfigError, TrialError) as error:
        print(f"ep-ray doctor: {error}", file=sys.stderr)
        return UNHEALTHY
    found = diagnose(nodes)
    what = f"Ray cluster of {len(nodes)} nodes" if args.address else "This machine"
    _print(args.json, found.as_dict, lambda: print_report(what, sections(found), sys.stdout))
    return HEALTHY if found.healthy else UNHEALTHY


def _load(args: argparse.Namespace) -> int:
    from sweeps.doctor.load import CELLS, QUICK, measure
    from sweeps.doctor.load_text import keeps_up, sections
    from sweeps.render_text import print_report

    try:
        found = measure(*((QUICK, _QUICK_REPEATS) if args.quick else (CELLS, _REPEATS)))
    except (ConfigError, TrialError, RuntimeError, KeyboardInterrupt) as error:
        print(f"ep-ray doctor load: {error or 'interrupted'}", file=sys.stderr)
        return UNHEALTHY
    title = "The load client and the router on this machine"
    _print(args.json, found.as_dict, lambda: print_report(title, sections(found), sys.stdout))
    return HEALTHY if keeps_up(found) else UNHEALTHY


def _print(as_json: bool, document: Callable[[], object], text: Callable[[], None]) -> None:
    try:
        if as_json:
            print(json.dumps(document(), indent=1), flush=True)
        else:
            text()
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; what was found stands.
        sys.stderr.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ep_ray.doctor",
        description="Says what this machine, or every node of a Ray cluster, can measure.",
    )
    parser.add_argument(
        "--address", help="a running Ray cluster: `auto` or HOST:PORT; default: this machine alone"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    load = parser.add_subparsers(dest="what", metavar="load").add_parser(
        "load",
        help="measure what the load client and the router themselves add here (2 minutes)",
        description="Measures load client and router against an engine without a model.",
    )
    load.add_argument("--quick", action="store_true", help="half a minute: two runs, no c=256")
    load.add_argument("--json", action="store_true", help="print every run as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
