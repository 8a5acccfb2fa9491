"""`icom provision --from_this_instance` in the box: the user's host is the instance, a worker starts from its disk.

Guards provisioning.this_instance.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from provisioning import project
from tests.support import disk
from tests.support.box import UBUNTU, Box
from tests.support.command import ROOT

OWN = """
import boto3, sys
reservations = boto3.client("ec2").describe_instances()["Reservations"]
print(*(i["InstanceId"] for r in reservations for i in r["Instances"] if i.get("PrivateIpAddress") == sys.argv[1]))
"""
METADATA = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"instanceId": sys.argv[1], "region": "eu-central-1"}).encode())

    do_PUT = do_GET
    log_message = lambda *_: None

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
"""Its metadata service: tests/provisioning/test_this_instance.py has one that is strict."""


@pytest.mark.long
def test_mpirun_on_this_instance_reaches_a_worker_made_from_its_disk(box: Box) -> None:
    """The set-up ends with a sum over both by mpirun. What was secret on the disk is not on the worker's."""
    box.install_in_base_image()
    laptop, environment = box.laptop, box.environment
    own = box.python("-c", OWN, laptop.address).stdout.strip()
    disk.copy(box.folder / "ec2" / f"disk-{UBUNTU}", own_disk := box.folder / "ec2" / f"disk-{own}")
    (own_disk / "root" / ".netrc").write_text("machine example.org login me password secret")
    clone = laptop.home / "icom"
    for path in project.project_files():
        (copy := box.folder / "icom" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy)
    # Where the environment is; on a real master it is in the clone, or conda's.
    settings = {"VENV": sys.prefix, "PYTHON": sys.executable, "ENV_MANAGER": "venv"}
    lines = [f"export {name} := {value}\n" for name, value in settings.items()]
    (box.folder / "icom" / "GNUmakefile").write_text("".join([*lines, "include Makefile\n"]))
    assert laptop.run(["cp", "-a", str(box.folder / "icom"), str(clone)]).returncode == 0

    server = laptop.start([sys.executable, "-c", METADATA, own], environment, ROOT)
    assert server.stdout
    with server.stdout:
        environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    icom = [sys.executable, "-m", "icom"]
    options = ["--yes", "--from_this_instance", "--count", "2"]
    done = laptop.run([*icom, "provision", *options], environment, clone, 240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce of 2 processes" in done.stdout
    assert "2 nodes of icom run" in done.stdout
    (worker,) = box.nodes
    assert worker.path("/root/icom/Makefile").exists()
    assert not worker.path("/root/.netrc").exists()
    gone = laptop.run([*icom, "teardown", "--yes", "--all_images"], environment, clone)
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert box.tagged("icom") == []
    assert box.nodes == []
