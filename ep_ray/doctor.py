"""Says what this machine, or a Ray cluster, can measure: `python -m ep_ray.doctor`.

python -m ep_ray.doctor [--address auto|HOST:PORT] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ep_ray.config.errors import ConfigError
from ep_ray.watchdog import TrialError

HEALTHY, UNHEALTHY = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0 if at least one measure can run and nothing is broken, else 1.
    """
    # These look up, and torch comes with them: `--help` needs neither.
    args = _parser().parse_args(argv)
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
    try:
        if args.json:
            print(json.dumps(found.as_dict(), indent=1), flush=True)
        else:
            what = f"Ray cluster of {len(nodes)} nodes" if args.address else "This machine"
            print_report(what, sections(found), sys.stdout)
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; the diagnosis stands.
        sys.stderr.close()
    return HEALTHY if found.healthy else UNHEALTHY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ep_ray.doctor",
        description="Says what this machine, or every node of a Ray cluster, can measure.",
    )
    parser.add_argument(
        "--address", help="a running Ray cluster: `auto` or HOST:PORT; default: this machine alone"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
