"""`python -m infer` is `infer`."""

from infer.cli import main

main()
