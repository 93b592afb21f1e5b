"""A deployment in the foreground: on a Ray of its own on this machine, or on the cluster at RAY_ADDRESS."""

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
OBJECTS = 100 << 20  # bytes of Ray's object store: nothing large goes through it


@contextmanager
def deployed(options: DeployOptions) -> Iterator[None]:
    """As long as it lasts, replicas answer. What this has started ends with it."""
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
    """To the cluster at RAY_ADDRESS; or to one that is made for this process alone."""
    alone = not os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:  # which reads these once
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # Serve's own news are in its log files
        if alone:  # its ports are open to all networks
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    local = {"include_dashboard": False, "object_store_memory": OBJECTS, "_node_ip_address": "127.0.0.1"}
    ray.init("local" if alone else None, namespace="serve", logging_level="WARNING", **(local if alone else {}))
    # Ray would end the process at once, and leave its own behind.
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, usual)


@contextmanager
def signalled() -> Iterator[threading.Event]:
    """Set by Ctrl-C and SIGTERM."""
    told = threading.Event()
    usual = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
