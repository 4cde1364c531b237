# SPDX-License-Identifier: Apache-2.0
"""The layouts of deploy/kubernetes as kustomize renders them, and the pods that they ask for.

Needs the program kubectl (1.21 or later) and PyYAML. Without them, require() ends the program with
77, which ctest shows as skipped."""

import os
import re
import shutil
import subprocess
import sys

try:
    import yaml
except ImportError:
    yaml = None

SKIPPED = 77
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "deploy", "kubernetes")
LAYOUTS = ("single-pod", "statefulset", "leaderworkerset", "tls", "monitoring", "two-coordinators")
NAMESPACE = "default"


def require():
    reason = None
    if yaml is None:
        reason = "Python has no yaml"
    elif shutil.which("kubectl") is None:
        reason = "the program kubectl is missing"
    else:
        done = subprocess.run(["kubectl", "kustomize", os.path.join(FOLDER, "base")],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            reason = "kubectl kustomize: " + done.stderr.strip()
    if reason is not None:
        print("skipped:", reason)
        sys.exit(SKIPPED)


def render(layout):
    """The objects of a layout."""
    done = subprocess.run(["kubectl", "kustomize", os.path.join(FOLDER, layout)], check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def find(objects, kind, name=None):
    """The only object of a kind (and name)."""
    found = [each for each in objects
             if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    if len(found) != 1:
        raise AssertionError("%d objects %s %s" % (len(found), kind, name))
    return found[0]


class Pod:
    """A pod as a controller would make it: its name, the names that resolve to it, its spec."""

    def __init__(self, name, spec, names=(), environment=()):
        self.name, self.spec, self.names = name, spec, [name, *names]
        self.environment = dict(environment)


def pods(objects):
    """All pods of a layout. The names are those that its Services make."""
    made = []
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "StatefulSet":
            service = spec["serviceName"]
            for i in range(spec["replicas"]):
                pod = "%s-%d" % (name, i)
                names = ["%s.%s" % (pod, service), "%s.%s.%s.svc" % (pod, service, NAMESPACE)]
                made.append(Pod(pod, spec["template"]["spec"], names + [service] * (i == 0)))
        elif each["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]
            leader = "%s-0.%s.%s" % (name, name, NAMESPACE)
            for i in range(template["size"]):
                role = "leaderTemplate" if i == 0 else "workerTemplate"
                made.append(Pod(
                    name + "-0" + "-%d" % i * (i > 0), template[role]["spec"], [leader] * (i == 0),
                    {"LWS_LEADER_ADDRESS": leader, "LWS_WORKER_INDEX": str(i),
                     "LWS_GROUP_SIZE": str(template["size"])}))
    return made


def token(objects):
    """The Secret that token.sh makes for a layout."""
    ids = [word.partition("=")[2] for pod, each in containers(objects)
           for word in command(pod, each, "10.0.0.1")[0] if word.startswith("--worker-id=")]
    done = subprocess.run([os.path.join(FOLDER, "token.sh"), *ids], check=True,
                          stdout=subprocess.PIPE, text=True)
    return yaml.safe_load(done.stdout)


def containers(objects):
    """(pod, container) of a layout."""
    return [(pod, each) for pod in pods(objects) for each in pod.spec["containers"]]


def command(pod, container, address):
    """The command line of a container, with its variables; and these variables."""
    fields = {"metadata.name": pod.name, "metadata.namespace": NAMESPACE, "status.podIP": address}
    variables = dict(pod.environment)
    for each in container.get("env", []):
        variables[each["name"]] = (each["value"] if "value" in each else
                                   fields[each["valueFrom"]["fieldRef"]["fieldPath"]])
    line = [re.sub(r"\$\((\w+)\)", lambda found: variables[found.group(1)], word)
            for word in container["command"] + container.get("args", [])]
    return line, variables
