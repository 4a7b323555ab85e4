"""`carma` and `python -m carma`. Nothing is imported before Ctrl-C is provided for: imports take a moment."""

import sys

INTERRUPTED = 130  # as carma.cli.error_output has it, which may not be imported yet


def main() -> int:
    try:
        from carma.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
