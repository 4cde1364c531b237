# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/monitoring without a group: promtool accepts them, the alerts follow the
stories of alerts.test.yml, and rules and dashboard use only series that the READMEs name.

    check.py

Ends with 77 if promtool is missing: the comparison of names has passed then."""

import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
FILES = os.path.join(ROOT, "deploy", "monitoring")
ROOMS = ("base", "coordinator", "listener", "rpc", "trace", "worker")
NAME = re.compile(r"\b(?:moe|process)_[a-z_]+")


def read(*path):
    with open(os.path.join(*path), encoding="utf8") as file:
        return file.read()


def documented():
    """Names of series as a scrape has them: histograms by their three parts."""
    names = set()
    for room in ROOMS:
        for line in read(ROOT, "daemon", room, "README.md").splitlines():
            if not line.startswith("| `"):
                continue
            for name in NAME.findall(line.split("|")[1]):
                names |= {name, name + "_bucket", name + "_sum", name + "_count"}
    return names


def expressions(dashboard):
    """All expressions of a dashboard: (title of the panel, text)."""
    return [(panel["title"], target["expr"])
            for panel in dashboard["panels"] for target in panel.get("targets", ())]


def main():
    known = documented()
    assert {"moe_requests_total", "process_open_fds", "moe_group_state"} <= known
    assert "moe_no_such_series" not in known
    rules = re.findall(r"expr: ((?:>-\n)?.*(?:\n {10}[^ ].*)*)", read(FILES, "moed.rules.yml"))
    dashboard = expressions(json.loads(read(FILES, "dashboard.json")))
    unknown = {name for text in rules + [expr for _, expr in dashboard]
               for name in NAME.findall(re.sub(r'"[^"]*"', '""', text)) if name not in known}
    print("%d rules, %d expressions of the dashboard" % (len(rules), len(dashboard)))
    if unknown:
        sys.exit("series that no README names: %s" % ", ".join(sorted(unknown)))
    if len(rules) < 20 or len(dashboard) < 40:
        sys.exit("rules or expressions were not found")
    if shutil.which("promtool") is None:
        print("promtool is missing (package prometheus)")
        sys.exit(77)
    for arguments in (["check", "config", os.path.join(FILES, "prometheus.yml")],
                      ["test", "rules", os.path.join(HERE, "alerts.test.yml")]):
        done = subprocess.run(["promtool", *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=100, check=False)
        print(done.stdout)
        if done.returncode != 0:
            sys.exit("promtool %s: exit %d" % (" ".join(arguments[:2]), done.returncode))


if __name__ == "__main__":
    main()
