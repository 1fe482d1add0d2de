"""Settings of `vllm-ktx serve`, and its command line split into ours and vLLM's. Imports neither Ray nor vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .affinity import Policy

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
# What belongs to the one public address; the replicas behind it listen on the loopback interface.
_PUBLIC_ONLY = ("--ssl-", "--uds", "--root-path", "--allowed-origins", "--middleware")


@dataclass(frozen=True)
class ServeOptions:
    """replicas: number of vLLM servers. arguments: of `vllm serve`, the model among them.

    session_header: requests with the same value of it go to the same replica; others by the first `head_chars`
    characters of their prompt. long_tokens: from so many on, a request looks for a replica with room. max_body_mib:
    larger requests get status 413. attempts: how many replicas a request is tried on before its first byte is out.
    drain_seconds: how long a replica that is taken down may finish its requests. replica_cpus, replica_gpus: what Ray
    reserves for each; replica_gpus unset: tensor times pipeline parallel size, 0 with vLLM's CPU build.
    command: what starts a server. environment: added to a server's.
    Raises ValueError, naming the setting, for what can't be served.
    """

    arguments: tuple[str, ...]
    replicas: int = 1
    host: str = "0.0.0.0"
    port: int = 8000
    session_header: str = "x-session-id"
    head_chars: int = 2048
    long_tokens: int = 32768
    max_body_mib: int = 32
    attempts: int = 3
    drain_seconds: float = 60.0
    start_seconds: float = 1800.0
    replica_cpus: float = 1.0
    replica_gpus: float | None = None
    command: tuple[str, ...] = SERVE
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("replicas", "head_chars", "long_tokens", "max_body_mib", "attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{flag(name)} {value}: use a whole number, 1 or more")
        for name in ("drain_seconds", "start_seconds", "replica_cpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} {getattr(self, name)}: use a number, 0 or more")
        for argument in self.arguments if self.replicas > 1 else ():
            if argument.startswith(_PUBLIC_ONLY):
                raise ValueError(
                    f"{argument.split('=')[0]} is about the public address, which is Ray Serve's when --replicas is "
                    "above 1: leave it out and terminate TLS or rewrite paths in front"
                )

    @classmethod
    def of(cls, settings: dict[str, Any]) -> ServeOptions:
        """From the `args` of a Serve YAML file. Raises ValueError for a key it doesn't know."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(
                f"args: {unknown[0]!r} is not a setting of vllm-ktx serve (known: {', '.join(sorted(known))})"
            )
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        settings["arguments"] = with_ktx(spelled(settings.get("arguments", ())))
        return cls(**settings)

    @property
    def policy(self) -> Policy:
        return Policy(long_tokens=self.long_tokens)

    @property
    def gpus(self) -> float:
        """GPUs of a replica."""
        if self.replica_gpus is not None:
            return self.replica_gpus
        if is_cpu_build():
            return 0
        tensor = _value(self.arguments, "--tensor-parallel-size", "-tp")
        return int(tensor or 1) * int(_value(self.arguments, "--pipeline-parallel-size", "-pp") or 1)

    def server_environment(self) -> dict[str, str]:
        """Of a replica's server. On CPU replicas of one machine share its cores: no pinning, and an equal part of the
        threads, unless the environment says something else."""
        shared = {}
        if is_cpu_build():
            threads = max(1, (os.cpu_count() or 1) // self.replicas)
            shared = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        # Ray itself sets OMP_NUM_THREADS for its workers, to their num_cpus.
        kept = {key: os.environ[key] for key in ("VLLM_CPU_OMP_THREADS_BIND",) if key in os.environ}
        return shared | kept | self.environment


def parse(argv: Sequence[str]) -> ServeOptions:
    """From the command line behind `vllm-ktx serve`; what isn't ours is vLLM's."""
    parser = argparse.ArgumentParser(
        prog="vllm-ktx serve",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="vllm-ktx serve MODEL [--replicas N] [options] [any option of vllm serve]",
        description="vLLM with KTX: one server, or several replicas behind one address (Ray Serve).",
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--replicas", type=int, help="vLLM servers; more than 1 needs Ray, the extra `ray`")
    several = parser.add_argument_group("with --replicas above 1")
    several.add_argument("--session-header", metavar="NAME")
    several.add_argument("--head-chars", type=int, help="characters of a prompt's head")
    several.add_argument("--long-tokens", type=int, help="from so many on: look for room")
    several.add_argument("--max-body-mib", type=int, help="larger requests: status 413")
    several.add_argument("--attempts", type=int, help="tries before the first byte")
    several.add_argument("--drain-seconds", type=float)
    several.add_argument("--start-seconds", type=float, help="most until it serves")
    several.add_argument("--replica-cpus", type=float, help="that Ray reserves")
    several.add_argument("--replica-gpus", type=float, help="that Ray reserves; default: as vLLM's parallel sizes say")
    ours, rest = parser.parse_known_args(spelled(argv))
    options = ServeOptions(arguments=with_ktx(tuple(rest)), **vars(ours))
    if options.replicas > 1:
        return options
    if ignored := sorted(vars(ours).keys() - {"host", "port", "replicas"}):
        names = ", ".join(map(flag, ignored))
        print(f"vllm-ktx serve: {names} do nothing without --replicas above 1", file=sys.stderr)
    return dataclasses.replace(
        options, arguments=(*options.arguments, "--host", options.host, "--port", str(options.port))
    )


def spelled(arguments: Iterable[Any]) -> tuple[str, ...]:
    """Options as vLLM reads them: dashes for underscores in a name, up to its first dot."""

    def one(argument: str) -> str:
        name = re.match(r"--[^.=]*", argument)
        return name[0].replace("_", "-") + argument[name.end() :] if name else argument

    return tuple(one(str(argument)) for argument in arguments)


def with_ktx(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """`arguments` of vllm serve, with KTX as attention backend unless they name one."""
    names = ("--attention-backend", "--attention-config", "-ac", "--attention-config.backend", "-ac.backend")
    named = any(a.split("=")[0] in names for a in arguments)
    return arguments if named else (*arguments, "--attention-backend", "ktx")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(arguments: Sequence[str], *names: str) -> str | None:
    for i, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in names:
            return value or (arguments[i + 1] if i + 1 < len(arguments) else None)
    return None


def is_cpu_build() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False
