"""``python -m backend_core.testing.lab report PLUGIN``: a plugin's Metal and CUDA kernels, run with all checks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from .errors import CompilerMissing
from .report_command import lines, report, summary


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if all is well, 1 if a kernel breaks its contract, 2 if nothing could be run."""
    parser = argparse.ArgumentParser(prog="python -m backend_core.testing.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="bytes per buffer against the contract, transactions, races")
    command.add_argument("plugin", help="name of an installed plugin")
    command.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    try:
        findings = report(options.plugin, threads=os.cpu_count() or 1)
    except (LookupError, CompilerMissing) as error:
        print(error.args[0] if error.args else error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=1))
    else:
        print("\n".join(lines(findings)))
        print(", ".join(f"{count} {name}" for name, count in summary(findings).items()))
    return 1 if any(f.wrong for f in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
