"""moto's server as a process of its own, with what it lacks of EC2 filled in; each gap is one function here.

Prints its address when it listens. `python -m tests.support.moto_server [FILE]`: FILE is told what happens to
instances, and whoever reads it decides when they run (`happenings_are_told`).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["MOTO_AMIS_PATH"] = str(Path(__file__).with_name("amis.json"))

from moto.core import responses
from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.models.elastic_block_store import EBSBackend
from moto.ec2.models.instances import Instance, InstanceState
from moto.ec2.models.tags import TagBackend
from moto.ec2.responses import EC2Response
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.servicequotas.models import ServiceQuotasBackend
from moto.ssm.models import Parameter, SimpleSystemManagerBackend
from werkzeug.serving import WSGIRequestHandler, make_server

VCPU_QUOTA = 5000
ADDRESS = "9.9.9.9"  # a public one, as the real service answers; nobody connects to it
READY: Callable[[Any], bool] = lambda made: not str(getattr(made, "key_name", "")).startswith("icom-pending-")  # noqa: E731
"""Whether an instance may run, and an image be available, that is pending. Nodes of a cluster pending-… never do."""
CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}


def instances_take_time() -> None:
    """In EC2 an instance is pending before it runs, stopping before it is stopped, and so on.

    Here it reaches the final state when it has been described once in the state before.
    """
    describe, run = EC2Response.describe_instances, EC2Response.run_instances

    def slowly(instance: Instance, state: str) -> None:
        instance._final = instance._state
        instance._state = InstanceState(state, CODES[state])

    def describe_instances(self: Any) -> ActionResult:
        self.error_on_dryrun()
        answer = self.serialized(describe(self))  # the states before they move on
        for instance in self.ec2_backend.all_instances():
            if "_final" in instance.__dict__ and (instance._final.name != "running" or READY(instance)):
                instance._state = instance.__dict__.pop("_final")
        status, headers, body = answer
        return body, {**headers, "status": status}

    def run_instances(self: Any) -> Any:
        answer = run(self)
        for instance in answer.result.instances:
            slowly(instance, "pending")
        return answer

    EC2Response.describe_instances = describe_instances
    EC2Response.run_instances = run_instances
    for name, state in (("terminate", "shutting-down"), ("stop", "stopping"), ("start", "pending")):
        original = getattr(Instance, name)

        def changed(self: Any, original: Any = original, state: str = state, name: str = name) -> Any:
            if name == "terminate" and self._state.name in ("shutting-down", "terminated"):
                return self._state  # moto fails the second time: the network interface is gone
            before = original(self)
            slowly(self, state)
            return before

        setattr(Instance, name, changed)


def client_tokens_count() -> None:
    """Repeating RunInstances with the same ClientToken gives the same instances."""
    run = EC2Response.run_instances

    def run_instances(self: Any) -> Any:
        self.error_on_dryrun()
        seen = self.ec2_backend.__dict__.setdefault("_by_token", {})
        token = self._get_param("ClientToken")
        if token not in seen:
            seen[token] = run(self)
        return seen[token]

    EC2Response.run_instances = run_instances


def placement_groups() -> None:
    """CreatePlacementGroup, DescribePlacementGroups, DeletePlacementGroup; moto has none of them."""
    describe = TagBackend.describe_tags

    def describe_tags(self: Any, filters: Any = None) -> Any:
        found = describe(self, filters)
        for tag in found:
            if tag["resource_id"].startswith("pg-"):
                tag["resource_type"] = "placement-group"
        return found

    TagBackend.describe_tags = describe_tags

    def groups(self: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.ec2_backend.__dict__.setdefault("_placement_groups", {})
        return found

    def create_placement_group(self: Any) -> ActionResult:
        name = self._get_param("GroupName")
        self.error_on_dryrun()
        if name in groups(self):
            raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' exists.")
        tags = self._parse_tag_specification("placement-group").get("placement-group", {})
        group = {"GroupName": name, "GroupId": f"pg-{os.urandom(8).hex()}", "Strategy": self._get_param("Strategy")}
        groups(self)[name] = {**group, "State": "available"}
        self.ec2_backend.tags[group["GroupId"]] = dict(tags)
        return ActionResult({"PlacementGroup": groups(self)[name]})

    def describe_placement_groups(self: Any) -> ActionResult:
        names = self._get_param("GroupNames", [])
        if unknown := [name for name in names if name not in groups(self)]:
            raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The placement group '{unknown[0]}' is unknown.")
        wanted = {key.removeprefix("tag:"): values for key, values in self._filters_from_querystring().items()}
        found = []
        for name, group in groups(self).items():
            tags = self.ec2_backend.tags[group["GroupId"]]
            known = {"group-name": name} | tags
            if (not names or name in names) and all(known.get(key) in values for key, values in wanted.items()):
                found.append({**group, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]})
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self: Any) -> ActionResult:
        name = self._get_param("GroupName")
        if name not in groups(self):
            raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The placement group '{name}' is unknown.")
        self.ec2_backend.tags.pop(groups(self).pop(name)["GroupId"], None)
        return EmptyResult()

    for function in (create_placement_group, describe_placement_groups, delete_placement_group):
        setattr(EC2Response, function.__name__, function)


def launches_keep_their_place() -> None:
    """An instance tells its placement group, and what kind its network interfaces are."""
    run = EC2Response.run_instances

    def run_instances(self: Any) -> Any:
        answer = run(self)
        cards = self._get_param("NetworkInterfaces", [])
        for instance in answer.result.instances:
            instance.placement.group_name = self._get_param("Placement.GroupName") or ""
            for card in cards:
                instance.nics[int(card["DeviceIndex"])].interface_type = card.get("InterfaceType", "interface")
        return answer

    EC2Response.run_instances = run_instances


def used_groups_stay() -> None:
    """A security group cannot be deleted while an instance in it is alive; deleted things lose their tags.

    DeleteKeyPair takes an id, too.
    """
    delete = EC2Response.delete_security_group
    delete_disk = EBSBackend.delete_volume

    def delete_volume(self: Any, volume_id: str) -> Any:
        answer = delete_disk(self, volume_id)
        self.tags.pop(volume_id, None)
        return answer

    EBSBackend.delete_volume = delete_volume

    def delete_security_group(self: Any) -> Any:
        id = self._get_param("GroupId")
        for instance in self.ec2_backend.all_instances():
            if instance._state.name != "terminated" and id in {
                g.id for n in instance.nics.values() for g in n.group_set
            }:
                raise EC2ClientError("DependencyViolation", f"resource {id} has a dependent object")
        answer = delete(self)
        self.ec2_backend.tags.pop(id, None)
        return answer

    def delete_key_pair(self: Any) -> Any:
        self.error_on_dryrun()
        wanted = (self._get_param("KeyName"), self._get_param("KeyPairId"))
        pairs = self.ec2_backend.key_pairs
        pair = next((pair for pair in pairs.values() if pair.key_name == wanted[0] or pair.id == wanted[1]), None)
        if pair is None and wanted[1]:
            raise EC2ClientError("InvalidKeyPair.NotFound", f"The key pair '{wanted[1]}' does not exist")
        if pair:
            self.ec2_backend.tags.pop(pairs.pop(pair.key_name).id, None)
        return EmptyResult()

    EC2Response.delete_security_group = delete_security_group
    EC2Response.delete_key_pair = delete_key_pair


def snapshots_of_images_have_tags() -> None:
    """CreateImage tags its snapshots too; what is deleted loses its tags."""
    create, deregister, delete = AmiBackend.create_image, AmiBackend.deregister_image, EBSBackend.delete_snapshot

    def create_image(self: Any, instance_id: str, name: str, description: str, tag_specifications: Any) -> Any:
        wanted = {spec["ResourceType"]: spec["Tags"] for spec in tag_specifications}
        own = [spec for spec in tag_specifications if spec["ResourceType"] != "snapshot"]
        image = create(self, instance_id, name, description, own)
        image.ebs_snapshot.add_tags({tag["Key"]: tag["Value"] for tag in wanted.get("snapshot", [])})
        return image

    def deregister_image(self: Any, ami_id: str) -> None:
        deregister(self, ami_id)
        self.tags.pop(ami_id, None)

    def delete_snapshot(self: Any, snapshot_id: str) -> Any:
        answer = delete(self, snapshot_id)
        self.tags.pop(snapshot_id, None)
        return answer

    AmiBackend.create_image, AmiBackend.deregister_image = create_image, deregister_image
    EBSBackend.delete_snapshot = delete_snapshot


def images_take_time() -> None:
    """CreateImage: an image is pending, until it was described once, before it is available and can be launched from.

    It is like the instance it was made from; a name is given once; the instance has to run or be stopped.
    """
    create, describe, run = AmiBackend.create_image, EC2Response.describe_images, EC2Response.run_instances
    mappings = Ami.block_device_mappings.fget

    def create_image(self: Any, instance_id: str, name: str, *arguments: Any) -> Any:
        instance = self.get_instance(instance_id)
        if instance._state.name not in ("running", "stopped"):
            raise EC2ClientError("IncorrectState", f"{instance_id} is {instance._state.name}, not running or stopped")
        if same := [image.id for image in self.amis.values() if image.name == name]:
            raise EC2ClientError("InvalidAMIName.Duplicate", f"AMI name {name} is already in use by AMI {same[0]}")
        image = create(self, instance_id, name, *arguments)
        source = self.amis[instance.image_id]
        for attribute in ("root_device_name", "root_device_type", "architecture", "hypervisor", "virtualization_type"):
            setattr(image, attribute, getattr(source, attribute))
        disk = instance.block_device_mapping[image.root_device_name]
        ebs = {"VolumeSize": disk.size, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
        image._like_its_instance = ebs
        image.state = "pending"
        return image

    def describe_images(self: Any) -> ActionResult:
        self.error_on_dryrun()
        status, headers, body = self.serialized(describe(self))
        for image in self.ec2_backend.amis.values():
            if image.state == "pending" and READY(image):
                image.state = "available"
        return body, {**headers, "status": status}

    def run_instances(self: Any) -> Any:
        image = self.ec2_backend.amis.get(self._get_param("ImageId"))
        if image and image.state != "available":
            raise EC2ClientError("InvalidAMIID.Unavailable", f"The image ID '{image.id}' is not available")
        return run(self)

    def block_device_mappings(self: Any) -> Any:
        (disk,) = mappings(self)
        return [{**disk, "Ebs": {**disk["Ebs"], **self.__dict__.get("_like_its_instance", {})}}]

    AmiBackend.create_image, Ami.block_device_mappings = create_image, property(block_device_mappings)
    EC2Response.describe_images, EC2Response.run_instances = describe_images, run_instances


def images_have_public_names() -> None:
    """SSM's public parameters of Canonical and AWS that name their current images."""
    images = {
        "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id": "ami-00000000000000aa1",
        "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id": "ami-00000000000000aa2",
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": (
            "ami-00000000000000aa3"
        ),
    }
    get = SimpleSystemManagerBackend.get_parameter

    def get_parameter(self: Any, name: str) -> Any:
        if name not in images:
            return get(self, name)
        from moto.core.utils import utcnow

        return Parameter("1", name, images[name], "String", None, None, None, utcnow(), 1, "text")

    SimpleSystemManagerBackend.get_parameter = get_parameter


def quotas_of_ec2() -> None:
    """Service Quotas knows only VPC in moto."""

    def get_service_quota(self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
        return {"ServiceCode": service_code, "QuotaCode": quota_code, "Value": float(VCPU_QUOTA)}

    ServiceQuotasBackend.get_service_quota = get_service_quota


def answers_are_quick() -> None:
    """For every request moto lists its own folder and its classes' methods; neither changes. Connections stay open."""
    responses.method_names_from_class = functools.cache(responses.method_names_from_class)
    dispatcher = DomainDispatcherApplication
    dispatcher.get_backend_for_host = functools.lru_cache(None)(dispatcher.get_backend_for_host)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    WSGIRequestHandler.disable_nagle_algorithm = True  # head and body are sent one by one


def happenings_are_told(file: Path) -> None:
    """A line of JSON in a file for all that happens to instances with user data, for who makes hosts for them.

    `event` is launch (with id, address, image, user_data), stop, start, terminate (with id) or image (with id,
    instance). An instance runs, and an image is available, once there is a file with its id beside that file.
    """
    global READY  # noqa: PLW0603
    READY = lambda it: not getattr(it, "user_data", "image") or file.with_name(it.id).exists()  # noqa: E731
    run, create = EC2Response.run_instances, AmiBackend.create_image

    def tell(**what: str) -> None:
        with file.open("a") as told:
            told.write(json.dumps(what) + "\n")

    def run_instances(self: Any) -> Any:
        answer = run(self)
        for instance in filter(lambda instance: instance.user_data, answer.result.instances):
            data, where = instance.user_data.decode(), instance.private_ip
            tell(event="launch", id=instance.id, address=where, image=instance.image_id, user_data=data)
        return answer

    def create_image(self: Any, instance_id: str, *arguments: Any, **options: Any) -> Any:
        image = create(self, instance_id, *arguments, **options)
        tell(event="image", id=image.id, instance=instance_id)
        return image

    EC2Response.run_instances, AmiBackend.create_image = run_instances, create_image
    for name in ("terminate", "stop", "start"):
        original = getattr(Instance, name)

        def changed(self: Any, original: Any = original, name: str = name) -> Any:
            if self.user_data and name != "start":
                file.with_name(self.id).unlink(missing_ok=True)
            before = original(self)
            if self.user_data:
                tell(event=name, id=self.id)
            return before

        setattr(Instance, name, changed)


def with_prices_and_address(app: Any) -> Callable[..., Iterable[bytes]]:
    """AWS's price list, and a service that tells the caller's address: one answer each."""

    def wrapped(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/address":
            start("200 OK", [("Content-Type", "text/plain")])
            return [f"{environ.get('QUERY_STRING') or ADDRESS}\n".encode()]
        if environ.get("HTTP_X_AMZ_TARGET", "").endswith("PriceListService.GetProducts"):
            body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            wanted = {entry["Field"]: entry["Value"] for entry in body["Filters"]}
            usd = "0.0952" if wanted.get("volumeApiName") == "gp3" else "0.9660"
            term = {"priceDimensions": {"x": {"pricePerUnit": {"USD": usd}}}}
            product = {"product": {"attributes": wanted}, "terms": {"OnDemand": {"x": term}}}
            start("200 OK", [("Content-Type", "application/x-amz-json-1.1")])
            return [json.dumps({"PriceList": [json.dumps(product)]}).encode()]
        answer: Iterable[bytes] = app(environ, start)
        return answer

    return wrapped


def main() -> None:
    for fill in (
        *(instances_take_time, launches_keep_their_place, client_tokens_count, placement_groups, used_groups_stay),
        *(images_take_time, snapshots_of_images_have_tags, images_have_public_names, quotas_of_ec2, answers_are_quick),
    ):
        fill()
    if len(sys.argv) > 1:
        happenings_are_told(Path(sys.argv[1]))
    app = with_prices_and_address(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
