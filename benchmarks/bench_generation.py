"""Benchmark generation: the same as `infer bench`, with the same options (see --help)."""

import sys

from infer.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
