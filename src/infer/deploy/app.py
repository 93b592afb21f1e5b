"""The Serve application: `import_path: infer.deploy.app:build` in a Serve config; its `args` are DeployOptions."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from infer.deploy.ingress import Ingress
from infer.deploy.options import DeployOptions, Resources, resources_for
from infer.deploy.replica import Replica, settings_of

HEALTH_S = 2.0  # between two health checks
LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def build(options: DeployOptions) -> Application:
    """Ray reads the annotation of the argument, which must not be a string: no `from __future__ import annotations`."""
    resources = resources_for(options, ray.nodes())
    replicas = _replicas(options, resources).bind(options, resources.threads, resources.neighbors)
    listen_on = None if options.port is None else (options.host, options.port)
    return _ingress(options).bind(replicas, settings_of(options), listen_on)


def _replicas(options: DeployOptions, resources: Resources) -> serve.Deployment:
    devices = {"CPU": resources.threads} | ({"GPU": resources.gpus} if resources.gpus else {})
    more: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        more = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_requests,
            }
        }
    if options.tensor_parallel > 1:  # one bundle: all ranks are on one machine
        more["placement_group_bundles"] = [devices]
    if options.prefix_routing:
        router = RequestRouterConfig(request_router_class="infer.deploy.router:PrefixRouter")
        more["request_router_config"] = router
    return serve.deployment(Replica).options(
        ray_actor_options={"num_cpus": resources.threads, "num_gpus": resources.gpus},
        max_ongoing_requests=options.max_rows,
        max_queued_requests=options.max_waiting,
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_S,
        logging_config=LOGGING,
        **more,
    )


def _ingress(options: DeployOptions) -> serve.Deployment:
    return serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        num_replicas=options.ingresses,
        max_surge_percent=100,  # in an update, the next one listens before this one ends
        max_ongoing_requests=1 << 16,  # it only forwards: requests wait for a replica
        graceful_shutdown_timeout_s=options.drain_seconds,
        logging_config=LOGGING,
    )
