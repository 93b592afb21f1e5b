"""A deployment in the foreground: on a local Ray instance of its own, or on the cluster at RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from infer.deploy.options import DeployOptions

NAME = "infer"  # of the application
OBJECT_STORE_BYTES = 100 << 20  # of Ray: nothing large goes through it


@contextmanager
def deployed(options: DeployOptions) -> Iterator[None]:
    """Within, replicas serve. All that was started ends with the block."""
    with connected():
        from ray import serve

        from infer.deploy.app import build

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        try:
            serve.run(build(options), name=NAME, route_prefix="/")
            yield
        finally:
            serve.delete(NAME)


@contextmanager
def connected() -> Iterator[None]:
    """To the cluster at RAY_ADDRESS, or to a local one of this process."""
    alone = not os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:  # Ray reads these at import
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # Serve writes log files
        if alone:  # its ports listen on all networks
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_node_ip_address": "127.0.0.1"}
    ray.init("local" if alone else None, namespace="serve", logging_level="WARNING", **(local if alone else {}))
    # Ray's handler would end this process at once, and leave Ray's processes running.
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, usual)


@contextmanager
def signalled() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set."""
    stop = threading.Event()
    usual = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
