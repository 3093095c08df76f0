"""Prints the report of a sweep, or of the published results, and writes it as Markdown.

python -m ep_ray.report RESULTS [--published external_dp] [--markdown FILE]
python -m ep_ray.report published [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sweeps.read import ResultsError
from sweeps.report import PUBLISHED_NAMES, of_published, of_results
from sweeps.tablefmt import markdown, print_report

_PUBLISHED = "published"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 2 when there is nothing to report on."""
    args = _parser().parse_args(argv)
    try:
        if args.results == _PUBLISHED:
            title, sections = of_published()
        else:
            title, sections = of_results(args.results, args.published)
        print_report(title, sections, sys.stdout)
        target = _markdown_file(args)
        if target is not None:
            target.write_text(markdown(title, sections), encoding="utf-8")
            print(f"\nWritten to {target}")
    except ResultsError as error:
        print(f"ep-ray report: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; nothing is wrong with the report.
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"ep-ray report: cannot write the Markdown: {error}", file=sys.stderr)
        return 2
    return 0


def _markdown_file(args: argparse.Namespace) -> Path | None:
    """Where Markdown goes: the file that was asked for, else `report.md` in the results."""
    if args.markdown is not None:
        return Path(args.markdown)
    return None if args.results == _PUBLISHED else Path(args.results) / "report.md"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ep_ray.report", description="Report on a sweep or on published results."
    )
    parser.add_argument(
        "results", help="results folder of a sweep, or `published` for the published tables"
    )
    parser.add_argument(
        "--published", choices=PUBLISHED_NAMES, help="published run to stand beside this one"
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="Markdown file; default: report.md in the results folder"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
