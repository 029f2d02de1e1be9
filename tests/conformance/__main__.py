"""The command: ``python tests/conformance``."""

import argparse
import json
import sys
import time
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).parent.parent))

import conformance
from conformance.expected import EXPECTED
from conformance.gpu import CHECKS
from conformance.runner import differences, observe, run_here


def main() -> int:
    parser = argparse.ArgumentParser(description=conformance.__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="which checks (default: all)")
    parser.add_argument("--driver", choices=("emulated", "real"), default="emulated")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and sizes")
    parser.add_argument("--here", action="store_true", help="in this process, not in others")
    arguments = parser.parse_args()
    names = arguments.checks or list(CHECKS)
    if unknown := set(names) - set(CHECKS):
        parser.error(f"no such checks: {', '.join(sorted(unknown))}")
    if arguments.here:
        run_here(names, arguments.driver, arguments.quick)
        return 0
    start, found = time.monotonic(), []
    for name, value in observe(names, arguments.driver, arguments.quick):
        print(json.dumps({name: value}), flush=True)
        found += differences(value, EXPECTED[name], arguments.quick, name)
    print(f"{len(names)} checks in {time.monotonic() - start:.0f} s, {len(found)} differences", file=sys.stderr)
    for line in found:
        print(f"  {line}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
