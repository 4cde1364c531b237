# SPDX-License-Identifier: Apache-2.0
"""The layouts of deploy/kubernetes, without a cluster: their schemas, and what they tell the
daemons.

  test_layouts.py BUILD [unittest arguments]"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import rendered

BUILD = sys.argv.pop(1)
SCHEMAS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "schemas")
VERSION = "1.31"  # of Kubernetes: 1.30 is the first that has preStop.sleep
CUSTOM = ("LeaderWorkerSet", "PodMonitor")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
SETTING = re.compile(r"(?m)^([\w-]+) = (.*)$")


def help_of(program):
    path = os.path.join(BUILD, "daemon", program.replace("moe-", ""), program)
    return subprocess.run([path, "--help"], check=True, stdout=subprocess.PIPE, text=True).stdout


def settings(line, config):
    """The settings of a command line, those of its file included."""
    words = [word[2:].partition("=") for word in line[1:]]
    given = {name: value for name, _, value in words}
    file = config[os.path.basename(given["config"])]
    return {**dict(SETTING.findall(file)), **given}


def port(address):
    return int(address.rpartition(":")[2])


class Layouts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.layouts = {name: rendered.render(name) for name in rendered.LAYOUTS}

    def each_container(self):
        for layout, objects in self.layouts.items():
            config = rendered.find(objects, "ConfigMap")["data"]
            for pod, container in rendered.containers(objects):
                line, _ = rendered.command(pod, container, "10.0.0.1")
                with self.subTest(layout=layout, pod=pod.name, container=container["name"]):
                    yield layout, pod, container, line, settings(line, config)

    def test_kubernetes_knows_every_field(self):
        try:
            import kubernetes_validate
        except ImportError:
            self.skipTest("Python has no kubernetes_validate (pip install kubernetes-validate)")
        for layout, objects in self.layouts.items():
            made = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name},
                     "spec": pod.spec} for pod in rendered.pods(objects)]
            made.append(rendered.token(objects))
            for each in made + [each for each in objects if each["kind"] not in CUSTOM]:
                with self.subTest(layout=layout, kind=each["kind"], name=each["metadata"]["name"]):
                    kubernetes_validate.validate(each, VERSION, strict=True)

    def test_custom_kinds_match_their_schemas(self):
        try:
            import jsonschema
        except ImportError:
            self.skipTest("Python has no jsonschema")
        seen = set()
        for objects in self.layouts.values():
            for each in objects:
                if each["kind"] in CUSTOM:
                    with open(os.path.join(SCHEMAS, each["kind"].lower() + ".json")) as file:
                        jsonschema.validate(each, json.load(file))
                    seen.add(each["kind"])
        self.assertEqual(seen, set(CUSTOM))

    def test_daemons_know_every_setting(self):
        helps = {name: help_of(name) for name in ("moe-coordinator", "moe-worker")}
        for _, _, _, line, given in self.each_container():
            for name in given:
                self.assertRegex(helps[line[0]], r"(?m)^ .*--%s\b" % name)

    def test_ports_are_those_of_the_daemons(self):
        for layout, pod, container, _, given in self.each_container():
            listens = {port(value) for name, value in given.items()
                       if name.endswith("listen") and not value.startswith("127.")}
            self.assertEqual({each["containerPort"] for each in container["ports"]}, listens)
            for name in PROBES:
                probe = container[name]
                self.assertIn(probe.get("grpc", probe.get("httpGet"))["port"], listens)
                if "httpGet" in probe:
                    self.assertEqual(probe["httpGet"]["port"], port(given["metrics-listen"]))
                self.assertEqual("livenessProbe" == name or "startupProbe" == name,
                                 probe.get("grpc", {}).get("service") == "moed.live" or
                                 probe.get("httpGet", {}).get("path") == "/livez")
            self.assertIn(port(given["metrics-listen"]), (9700, *range(9600, 9608)))
            if "advertise" in given:
                self.assertEqual(port(given["advertise"]), port(given["listen"]))
                self.assertIn(port(given["listen"]), range(7600, 7608))

    def test_the_number_of_workers_is_right(self):
        for layout, objects in self.layouts.items():
            with self.subTest(layout=layout):
                wanted = {settings(line, rendered.find(objects, "ConfigMap")["data"])["workers"]
                          for pod, container in rendered.containers(objects)
                          for line in [rendered.command(pod, container, "10.0.0.1")[0]]
                          if line[0] == "moe-coordinator"}
                workers = sum(container["command"] == ["moe-worker"]
                              for _, container in rendered.containers(objects))
                self.assertEqual(wanted, {str(workers)})

    def test_workers_name_all_coordinators(self):
        """Those of etcd and of single ones alike; and the policy lets coordinators reach etcd."""
        for layout, pod, container, line, given in self.each_container():
            if line[0] != "moe-worker" or layout == "single-pod":
                continue
            hosts = [each.rpartition(":")[0] for each in given["coordinator"].split(",")]
            named = [other.name for other, each in rendered.containers(self.layouts[layout])
                     if each["command"] == ["moe-coordinator"] and set(hosts) & set(other.names)]
            self.assertEqual(len(named), len(hosts))
            self.assertEqual(named, [other.name for other, each in rendered.containers(
                self.layouts[layout]) if each["command"] == ["moe-coordinator"]])
        objects = self.layouts["two-coordinators"]
        etcd = dict(SETTING.findall(
            rendered.find(objects, "ConfigMap")["data"]["coordinator.conf"]))["etcd"]
        policy = rendered.find(objects, "NetworkPolicy", "moed-etcd")["spec"]
        self.assertEqual(policy["egress"][0]["ports"], [{"port": port(etcd)}])
        selected = policy["podSelector"]["matchLabels"]
        labels = rendered.find(objects, "StatefulSet",
                               "moed-coordinator")["spec"]["template"]["metadata"]["labels"]
        self.assertLessEqual(selected.items(), labels.items())

    def test_no_right_that_is_not_needed(self):
        for _, pod, container, _, _ in self.each_container():
            self.assertIs(pod.spec["automountServiceAccountToken"], False)
            self.assertIs(pod.spec["securityContext"]["runAsNonRoot"], True)
            self.assertEqual(pod.spec["securityContext"]["seccompProfile"]["type"],
                             "RuntimeDefault")
            self.assertEqual(container["securityContext"],
                             {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                              "capabilities": {"drop": ["ALL"]}})
            self.assertIn("memory", container["resources"]["limits"])

    def test_a_drain_ends_within_the_grace_period(self):
        for _, pod, container, line, given in self.each_container():
            if line[0] != "moe-worker":
                continue
            pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            self.assertGreaterEqual(pod.spec["terminationGracePeriodSeconds"],
                                    int(given["drain-ms"]) / 1000 + pause + 5)

    def test_links_are_open_only_where_the_layout_says_so(self):
        for layout, _, _, _, given in self.each_container():
            if layout == "tls":
                self.assertNotIn("insecure", given)
                self.assertIn("tls-client-ca", given)
                self.assertIn("access-file", given)
            else:
                self.assertIn("token-file", given)

    def test_the_identities_of_workers_are_the_pods(self):
        objects = self.layouts["tls"]
        access = json.loads(rendered.find(objects, "ConfigMap")["data"]["access.json"])
        ids = access["identities"]["spiffe://moed/workers"]["worker_ids"]
        self.assertEqual(sorted(ids), sorted(
            pod.name for pod, each in rendered.containers(objects) if each["name"] == "worker"))

    def test_the_examples_of_the_page_render(self):
        """Own settings on top of a layout, next to a checkout, and a claim for the model."""
        with open(os.path.join(rendered.FOLDER, "README.md"), encoding="utf8") as file:
            claim, own = re.findall(r"(?ms)^```yaml\n(.*?)^```", file.read())
        with tempfile.TemporaryDirectory(prefix="moed-own-") as folder:
            shutil.copytree(rendered.FOLDER, os.path.join(folder, "moed", "deploy", "kubernetes"))
            for name, text in (("kustomization.yaml", own), ("worker.conf", "threads = 8\n"),
                               ("coordinator.conf", "workers = 8\n")):
                with open(os.path.join(folder, name), "w", encoding="utf8") as file:
                    file.write(text)
            objects = rendered.render(folder)
        workers = rendered.find(objects, "StatefulSet", "moed-worker")["spec"]
        container, = workers["template"]["spec"]["containers"]
        self.assertEqual((workers["replicas"], container["image"]),
                         (8, "registry.example/moed:0.2.0-cuda"))
        self.assertEqual(container["resources"]["limits"],
                         {"memory": "32Gi", "nvidia.com/gpu": 1})
        self.assertEqual(rendered.find(objects, "ConfigMap")["data"]["worker.conf"],
                         "threads = 8\n")
        names = {volume["persistentVolumeClaim"]["claimName"]
                 for volume in workers["template"]["spec"]["volumes"]
                 if "persistentVolumeClaim" in volume}
        self.assertEqual(names, {rendered.yaml.safe_load(claim)["metadata"]["name"]})


if __name__ == "__main__":
    rendered.require()
    unittest.main(verbosity=2)
