# SPDX-License-Identifier: Apache-2.0
"""Runs pods here as a node would: each pod has a network namespace, each container a root, a
process namespace, the volumes, the user and the limits of its spec. Needs root.

Volumes hold what the test gives: ConfigMaps come from the rendered objects, Secrets and claims are
folders of the test."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import rendered

SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
CGROUPS = "/sys/fs/cgroup/memory"
DEVICES = ("null", "zero", "random", "urandom")
# What the launcher does inside of the new namespaces; $1 is the root, the rest the command.
LAUNCH = """
root=$1; shift
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -o bind,remount,ro "$root" "$root"
exec chroot "$root" setpriv --reuid USER --regid GROUP --groups GROUPS --no-new-privs \
    --bounding-set=-all --inh-caps=-all -- "$@"
"""


def health_stub(channel):
    """grpc.health.v1.Health/Check, from its public fields."""
    file = descriptor_pb2.FileDescriptorProto(name="probe_health.proto", package="probe",
                                              syntax="proto3")
    for name, field, kind in (("Request", "service", 9), ("Response", "status", 5)):
        message = file.message_type.add(name=name)
        message.field.add(name=field, number=1, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, response = (message_factory.MessageFactory(pool).GetPrototype(
        pool.FindMessageTypeByName("probe." + name)) for name in ("Request", "Response"))
    call = channel.unary_unary("/grpc.health.v1.Health/Check",
                               request_serializer=request.SerializeToString,
                               response_deserializer=response.FromString)
    return lambda service, timeout: call(request(service=service), timeout=timeout).status == 1


class Container:
    def __init__(self, node, pod, spec):
        self.node, self.pod, self.spec = node, pod, spec
        self.name = "%s/%s" % (pod.name, spec["name"])
        self.root = os.path.join(node.folder, self.name.replace("/", "-"))
        self.process = None
        self.log = None

    @property
    def address(self):
        return self.node.addresses[self.pod.name]

    # ---------------------------------------------------------------- root and volumes

    def _volume(self, name):
        """The folder of a volume; made at its first use by a pod."""
        volumes = {each["name"]: each for each in self.pod.spec["volumes"]}
        volume = volumes.get(name, {})  # else the controller makes a claim for it
        place = os.path.join(self.node.folder, "volumes", self.pod.name, name)
        group = self.pod.spec["securityContext"]["fsGroup"]
        if os.path.isdir(place):
            return place
        os.makedirs(place)
        if "configMap" in volume:
            config = rendered.find(self.node.objects, "ConfigMap", volume["configMap"]["name"])
            self._write(place, config["data"], 0o644, group)
        elif "secret" in volume:
            data = self.node.secrets[volume["secret"]["secretName"]]
            self._write(place, data, volume["secret"]["defaultMode"], group)
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if claim in self.node.claims:
                shutil.rmtree(place)
                return self.node.claims[claim]
        os.chown(place, 0, group)
        os.chmod(place, 0o2777)
        return place

    @staticmethod
    def _write(place, data, mode, group):
        """As the kubelet does: files in a folder behind a link, of root and the pod's group."""
        folder = os.path.join(place, "..2026")
        os.mkdir(folder)
        for name, text in data.items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
            os.chmod(file.name, mode)
            os.chown(file.name, 0, group)
            os.symlink(os.path.join("..data", name), os.path.join(place, name))
        os.symlink("..2026", os.path.join(place, "..data"))

    def _make_root(self):
        for name in ("etc", "proc", "sys", "dev", "opt", *SYSTEM):
            os.makedirs(os.path.join(self.root, name), exist_ok=True)
        self.write_hosts()
        with open(os.path.join(self.root, "etc", "resolv.conf"), "w"):
            pass
        for name in DEVICES:
            with open(os.path.join(self.root, "dev", name), "w"):
                pass
        for mount in self.spec["volumeMounts"]:
            os.makedirs(self.root + mount["mountPath"], exist_ok=True)

    def write_hosts(self):
        """Names of pods; a file, because there is no DNS server."""
        with open(os.path.join(self.root, "etc", "hosts"), "w") as file:
            file.write("127.0.0.1 localhost\n" + self.node.hosts())

    def _binds(self):
        lines = ["mount --make-rprivate /", 'mount --bind "%s" "%s"' % (self.root, self.root)]
        pairs = [("/" + name, name, True) for name in SYSTEM if os.path.isdir("/" + name)]
        pairs += [("/dev/" + name, "dev/" + name, False) for name in DEVICES]
        pairs += [(self.node.programs, "opt", True)]
        pairs += [(self._volume(each["name"]), each["mountPath"].lstrip("/"),
                   each.get("readOnly", False)) for each in self.spec["volumeMounts"]]
        for source, place, read_only in pairs:
            to = os.path.join(self.root, place)
            lines.append('mount --bind "%s" "%s"' % (source, to))
            if read_only:
                lines.append('mount -o bind,remount,ro "%s" "%s"' % (to, to))
        return "\n".join(lines) + "\n"

    # ---------------------------------------------------------------- life

    def start(self):
        self._make_root()
        line, variables = rendered.command(self.pod, self.spec, self.address)
        user = self.pod.spec["securityContext"]
        script = self._binds() + LAUNCH.replace("USER", str(user["runAsUser"])).replace(
            "GROUPS", str(user["fsGroup"])).replace("GROUP", str(user["runAsGroup"]))
        self.log = open(os.path.join(self.node.folder, self.name.replace("/", "-") + ".log"), "ab")
        host = self.node.hosts_of[self.pod.name]
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script,
                  "sh", self.root, *line]
        self.process = subprocess.Popen(
            ["sh", "-ec", self.node.limits(self.spec) + 'exec "$@"', "sh",
             *self.node.net.command(host, inside)], stdout=self.log, stderr=self.log,
            env={"PATH": "/opt:/usr/sbin:/usr/bin:/sbin:/bin", **variables})
        self.log.close()

    def daemon(self):
        """The process of the daemon: the first one of the container's process namespace."""
        with open("/proc/%d/task/%d/children" % (self.process.pid, self.process.pid)) as file:
            return int(file.read().split()[0])

    def signal(self, number):
        os.kill(self.daemon(), number)

    def end(self):
        """Kills the daemon itself: its change of user took away the signal of --kill-child."""
        while self.process.poll() is None:
            try:
                self.signal(signal.SIGKILL)
            except (IndexError, OSError):  # not started yet, or gone
                pass
            time.sleep(0.01)

    def wait(self, seconds):
        return self.process.wait(timeout=seconds)

    # ---------------------------------------------------------------- probes

    def probe(self, which):
        """One round of a probe, from the node. The test's thread must be on the network."""
        probe = self.spec[which]
        seconds = max(probe.get("timeoutSeconds", 1), 5)  # the kubelet's may be too short here
        if "grpc" in probe:
            with grpc.insecure_channel("%s:%d" % (self.address, probe["grpc"]["port"])) as channel:
                try:
                    return health_stub(channel)(probe["grpc"].get("service", ""), seconds)
                except grpc.RpcError:
                    return False
        url = "http://%s:%d%s" % (self.address, probe["httpGet"]["port"], probe["httpGet"]["path"])
        try:
            with urllib.request.urlopen(url, timeout=seconds) as page:
                return 200 <= page.status < 400
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self, port):
        """The page of the metrics; "" while there is none."""
        try:
            with urllib.request.urlopen("http://%s:%d/metrics" % (self.address, port),
                                        timeout=5) as page:
                return page.read().decode()
        except (urllib.error.URLError, OSError):
            return ""

    def text(self):
        with open(self.log.name, errors="replace") as file:
            return file.read()


class Node:
    """The containers of a layout. The last host of the network is the test's; it also stands for
    the Services `outside`, which the layout does not make."""

    def __init__(self, net, objects, programs, secrets, claims, outside=()):
        self.net, self.objects, self.secrets, self.claims = net, objects, secrets, claims
        self.outside = outside
        self.folder = tempfile.mkdtemp(prefix="moed-pods-")
        os.chmod(self.folder, 0o755)
        self.programs = os.path.join(self.folder, "programs")
        os.mkdir(self.programs)
        for each in programs:
            shutil.copy(each, self.programs)
        self.pods = rendered.pods(objects)
        self.hosts_of = {pod.name: i for i, pod in enumerate(self.pods)}
        self.addresses = {pod.name: net.address(i) for i, pod in enumerate(self.pods)}
        self.containers = [Container(self, pod, each)
                           for pod in self.pods for each in pod.spec["containers"]]

    def hosts(self):
        names = [(self.addresses[pod.name], *pod.names) for pod in self.pods]
        names.append((self.net.address(self.net.hosts - 1), "node", *self.outside))
        return "".join(" ".join(each) + "\n" for each in names)

    def move(self, pod, address):
        """Gives a pod another address, as when it starts on another node. The old one is gone."""
        host = self.hosts_of[pod.name]
        for verb, each in (("del", self.addresses[pod.name]), ("add", address)):
            self.net.run(host, ["ip", "address", verb, each + "/24", "dev", "eth0"], check=True)
        self.addresses[pod.name] = address
        for each in self.containers:
            each.write_hosts()

    def limits(self, spec):
        """Shell commands that set the memory limit of a container, where this machine allows it."""
        if not os.access(os.path.join(CGROUPS, "cgroup.procs"), os.W_OK):
            return ""
        sizes = {"Mi": 1 << 20, "Gi": 1 << 30}
        text = spec["resources"]["limits"]["memory"]
        place = os.path.join(CGROUPS, os.path.basename(self.folder) + "-$$")
        return 'mkdir %s; echo %d >%s/memory.limit_in_bytes; echo $$ >%s/cgroup.procs; ' % (
            place, int(text[:-2]) * sizes[text[-2:]], place, place)

    def __enter__(self):
        for each in self.containers:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.containers:
            each.end()
        time.sleep(0.1)
        for name in os.listdir(CGROUPS) if os.path.isdir(CGROUPS) else []:
            if name.startswith(os.path.basename(self.folder)):
                try:
                    os.rmdir(os.path.join(CGROUPS, name))
                except OSError:
                    pass  # the kernel still has pages of it
        shutil.rmtree(self.folder, ignore_errors=True)
