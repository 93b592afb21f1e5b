"""The application: `import_path: infer.deploy.app:build` in a Serve config; its `args` are the DeployOptions."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from infer.deploy.engine import Engine
from infer.deploy.ingress import Ingress
from infer.deploy.options import DeployOptions
from infer.deploy.placement import Place, placed
from infer.server.settings import Settings

HEALTH_S = 2.0  # between two health checks
LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def build(options: DeployOptions) -> Application:
    """Ray reads the type of its argument, which must not be a string: no `from __future__ import annotations` here."""
    place = placed(options, ray.nodes())
    engines = _engines(options, place).bind(options, place.threads, place.neighbours)
    door = None if options.port is None else (options.host, options.port)
    return _ingress(options).bind(engines, _settings(options), door)


def _engines(options: DeployOptions, place: Place) -> serve.Deployment:
    devices = {"CPU": place.threads} | ({"GPU": place.gpus} if place.gpus else {})
    more: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        more = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_requests,
            }
        }
    if options.tensor_parallel > 1:  # one bundle: the ranks are processes of one machine
        more["placement_group_bundles"] = [devices]
    if options.prefix_routing:
        router = RequestRouterConfig(request_router_class="infer.deploy.router:PrefixRouter")
        more["request_router_config"] = router
    return serve.deployment(Engine).options(
        ray_actor_options={"num_cpus": place.threads, "num_gpus": place.gpus},
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
        max_ongoing_requests=1 << 16,  # it only hands on: what waits, waits for a replica
        graceful_shutdown_timeout_s=options.drain_seconds,
        logging_config=LOGGING,
    )


def _settings(options: DeployOptions) -> Settings:
    return Settings(
        options.model_id,
        api_keys=options.api_keys,
        cors=options.cors,
        hosts=options.hosts,
        drain_seconds=options.drain_seconds,
    )
