"""The Ray Serve application: replicas, an ingress before them, and what `vllm-ktx serve --replicas N` runs.

`serve run` takes it by its import path, `vllm_ktx.serving.app:build`, with `ServeOptions` as `args`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from .ingress import Ingress
from .options import ServeOptions
from .replica import Replica
from .wire import Forward, Head, ReplicaLost

logger = logging.getLogger("vllm.ktx.serving")
APP = "vllm-ktx"
HEALTH_PERIOD_S = 1.0  # how long a dead replica may go unnoticed
MANY = 1 << 20  # requests under way: vLLM has the queue, and --max-num-queued-reqs to bound it


class ReplicaDeployment:
    """A Serve replica: one vLLM server."""

    async def __init__(self, options: ServeOptions) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._replica = await Replica.start(self._name, options)

    async def forward(self, request: Forward) -> AsyncIterator[Head | bytes]:
        async for part in self._replica.forward(request):
            yield part

    async def metrics(self) -> tuple[str, str]:
        return self._name, await self._replica.metrics()

    async def healthy(self) -> str:
        await self._replica.check()
        return self._name

    async def check_health(self) -> None:
        await self._replica.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"free_tokens": await self._replica.refresh_room()}

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.close()


class RayBackend:
    """The replicas, through a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._stream = handle.options(method_name="forward", stream=True)

    async def forward(self, request: Forward) -> AsyncIterator[Head | bytes]:
        parts = self._stream.remote(request)
        done = False
        try:
            async for part in parts:
                yield part
            done = True
        except RayTaskError as error:
            cause = error if isinstance(error, ReplicaLost) else error.cause
            if isinstance(cause, ReplicaLost):
                raise ReplicaLost(cause.reason, cause.replica) from None
            raise
        except TaskCancelledError:
            raise
        except RayError as error:  # the actor died, or its node did
            raise ReplicaLost(f"{type(error).__name__} from Ray") from None
        finally:
            if not done:
                parts.cancel()

    async def healthy(self) -> list[str]:
        return [name for name in await self._all("healthy") if isinstance(name, str)]

    async def metrics(self) -> dict[str, str]:
        return dict(pair for pair in await self._all("metrics") if isinstance(pair, tuple))

    async def _all(self, method: str) -> list[Any]:
        """What every replica answers; exceptions of those that can't."""
        try:
            return await self._handle.broadcast(method).results_async(timeout_s=15, return_exceptions=True)
        except TimeoutError:
            return []


class IngressDeployment:
    """Serve's HTTP entry."""

    def __init__(self, replicas: DeploymentHandle, options: ServeOptions) -> None:
        self._ingress = Ingress(RayBackend(replicas), options)

    async def __call__(self, request: Request) -> Response:
        return await self._ingress.handle(request)


def application(options: ServeOptions) -> serve.Application:
    """The Serve application for these options."""
    resources: dict[str, Any] = {"num_cpus": options.replica_cpus}
    if options.gpus:
        resources["num_gpus"] = options.gpus
    replicas = serve.deployment(
        name="replica",
        num_replicas=options.replicas,
        max_ongoing_requests=MANY,
        ray_actor_options=resources,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class="vllm_ktx.serving.ray_router:AffinityRouter",
            request_router_kwargs={"long_tokens": options.long_tokens},
            request_routing_stats_period_s=2,
        ),
    )(ReplicaDeployment)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.drain_seconds,
    )(IngressDeployment)
    return ingress.bind(replicas.bind(options), options)


def build(args: dict[str, Any]) -> serve.Application:
    """For `serve run` and KubeRay: `args` are the fields of `ServeOptions`."""
    return application(ServeOptions.of(args))


def start(options: ServeOptions, address: str | None = None) -> None:
    """Starts Ray here, or joins the cluster at `address` (or RAY_ADDRESS), and deploys; returns when it serves."""
    connect(options, address)
    deploy(options)


def connect(options: ServeOptions, address: str | None = None) -> bool:
    """Whether Ray was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address or os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, log_to_driver=True)
        return False
    cpus = max(os.cpu_count() or 1, int(options.replicas * options.replica_cpus + 0.999))
    ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=True)
    return True


def deploy(options: ServeOptions) -> None:
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(application(options), name=APP, route_prefix="/")


def stop(drain: bool = True) -> None:
    """Drains and ends the application (without `drain` it dies with its Ray), then Ray if it was started here.
    Idempotent."""
    if not ray.is_initialized():
        return
    if drain:
        with suppress(RayServeException):  # there is no Serve yet
            serve.delete(APP)
        serve.shutdown()
    ray.shutdown()


def main(options: ServeOptions, address: str | None = None) -> int:
    """Serves until SIGINT or SIGTERM, then drains and returns 0; one that comes before it serves ends it with 130."""

    def on_signal(handler: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    serves = local = False
    on_signal(end)
    try:
        local = connect(options, address)
        on_signal(end)  # Ray has put its own for SIGTERM there, which drains nothing
        deploy(options)
        serves = True
        print(f"vllm-ktx: {options.replicas} replicas serve on http://{options.host}:{options.port}", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        on_signal(signal.SIG_IGN)
        what = f"draining, for up to {options.drain_seconds:.0f} s" if serves else "told to stop before it served"
        print(f"vllm-ktx: {what}", flush=True)
    finally:
        stop(drain=serves or not local)
    return 0 if serves else 130
