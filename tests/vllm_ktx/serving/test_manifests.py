"""The YAML files that the documentation offers: Serve's own schema takes them, and they build the application."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray.serve", reason="Ray is not installed (pip install -e '.[ray]')")

from ray import serve
from ray.serve.schema import ServeDeploySchema

from vllm_ktx.serving import app

FOLDER = Path(__file__).parents[3] / "packaging" / "ray"


def kuberay() -> dict:
    return yaml.safe_load((FOLDER / "kuberay.yaml").read_text())


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_serve_takes_it_and_it_builds(name):
    document = yaml.safe_load((FOLDER / name).read_text())
    if name == "kuberay.yaml":
        document = yaml.safe_load(document["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "vllm_ktx.serving.app:build" and application.route_prefix == "/"
    assert isinstance(app.build(application.args), serve.Application)


def test_kuberay_workers_hold_their_replicas_and_outlive_their_draining():
    document = kuberay()
    args = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"][0]["args"]
    (group,) = document["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert group["replicas"] >= args["replicas"]
    assert int(limits["nvidia.com/gpu"]) >= args["replica_gpus"] and int(limits["cpu"]) >= args["replica_cpus"]
    assert pod["terminationGracePeriodSeconds"] > args["drain_seconds"]
    assert args["replica_cpus"] > 0, "a Ray head with no CPUs must not get a replica"
