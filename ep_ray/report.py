"""Prints the report of a sweep, or of the published results, and writes it as Markdown.

python -m ep_ray.report RESULTS [--full] [--published external_dp] [--markdown FILE]
python -m ep_ray.report published [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sweeps.read import ResultsError
from sweeps.render_markdown import markdown
from sweeps.render_text import print_report
from sweeps.report import PUBLISHED_NAMES, Report, footer, of_published, of_results

_PUBLISHED = "published"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 2 when there is nothing to report on."""
    args = _parser().parse_args(argv)
    try:
        report = _report(args)
        print_report(report.title, report.full if args.full else report.brief, sys.stdout)
        _write(args, report)
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


def _report(args: argparse.Namespace) -> Report:
    if args.results == _PUBLISHED:
        return of_published()
    return of_results(args.results, args.published)


def _write(args: argparse.Namespace, report: Report) -> None:
    """Writes Markdown to the file that was asked for, else to `report.md` in the results."""
    if args.results == _PUBLISHED and args.markdown is None:
        return
    target = Path(args.markdown or Path(args.results) / "report.md")
    target.write_text(markdown(report.title, report.full), encoding="utf-8")
    if args.results == _PUBLISHED:
        print(f"\nWritten to {target}")
    else:
        print(footer(args.results, target))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ep_ray.report", description="Report on a sweep or on published results."
    )
    parser.add_argument(
        "results", help="results folder of a sweep, or `published` for the published tables"
    )
    parser.add_argument(
        "--full", action="store_true", help="print everything; the Markdown always has it"
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
