#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists the artefacts of a release and what is in them, as SPDX 2.3.

    sbom.py VERSION TIME FOLDER

FOLDER has the artefacts that release.sh makes; TIME is that of the commit, in seconds. Writes
FOLDER/moed-VERSION.spdx.json: each artefact with its checksum, the packages that a package of
Debian or the wheel depends on, and the libraries of Debian that are in the image."""

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile

LIBRARIES = "usr/share/doc/moed/libraries"
DEBIAN = "Organization: Debian"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def identifier(*words):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))


def package(name, version, supplier, licence, **more):
    return {"SPDXID": identifier(name, version), "name": name, "versionInfo": version,
            "supplier": supplier, "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
            "licenseConcluded": "NOASSERTION", "licenseDeclared": licence,
            "copyrightText": "NOASSERTION", **more}


def of_debian(name, version, *source):
    """A package of Debian, of which only the image knows the version."""
    more = {}
    if source:
        more["sourceInfo"] = "built from %s %s" % source
    if version:
        more["externalRefs"] = [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                                 "referenceLocator": "pkg:deb/debian/%s@%s" % (
                                     name, version.replace("+", "%2B").replace(":", "%3A"))}]
    found = package(name, version, DEBIAN, "NOASSERTION", **more)
    if not version:
        del found["versionInfo"]
    return found


def dependencies(path):
    """Names of packages that a Debian package depends on; of alternatives, the first."""
    said = subprocess.run(["dpkg-deb", "--field", path, "Depends"], check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    return sorted({d.split("|")[0].split("(")[0].strip().split(":")[0]
                   for d in said.split(",") if d.strip()})


def requirements(path):
    """Packages of PyPI that a wheel needs. It names no versions, or least ones."""
    with zipfile.ZipFile(path) as wheel:
        name, = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        lines = wheel.read(name).decode().splitlines()
    found = []
    for line in lines:
        match = re.match(r"Requires-Dist: ([\w.-]+)([^;]*)$", line)  # with `;`: an extra
        if match:
            each = package(match.group(1), "", "NOASSERTION", "NOASSERTION", externalRefs=[
                {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                 "referenceLocator": "pkg:pypi/" + match.group(1)}])
            each["SPDXID"] = identifier("pypi", match.group(1))
            del each["versionInfo"]
            found.append(each)
    return found


def libraries(path):
    """The lines of the image's list."""
    with tarfile.open(path) as outer:
        for member in filter(tarfile.TarInfo.isfile, outer.getmembers()):
            try:
                with tarfile.open(fileobj=outer.extractfile(member)) as layer:
                    listing = layer.extractfile(LIBRARIES).read().decode()
                    return [line.split() for line in listing.splitlines()]
            except (tarfile.ReadError, KeyError):  # no layer, or one without the list
                continue
    sys.exit("%s has no %s" % (path, LIBRARIES))


def main(version, seconds, folder):
    packages, relations = {}, []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        checksum = digest(path)
        artefact = package(name, version, "Organization: moed maintainers", "Apache-2.0",
                           packageFileName=name,
                           checksums=[{"algorithm": "SHA256", "checksumValue": checksum}])
        packages[artefact["SPDXID"]] = artefact
        relations.append(("SPDXRef-DOCUMENT", "DESCRIBES", artefact["SPDXID"]))
        parts, relation = [], "DEPENDS_ON"
        if name.endswith(".deb"):
            parts = [of_debian(d, "") for d in dependencies(path)]
        elif name.endswith(".whl"):
            parts = requirements(path)
        elif name.endswith(".oci.tar"):
            parts, relation = [of_debian(*line) for line in libraries(path)], "CONTAINS"
        for part in parts:
            packages[part["SPDXID"]] = part
            relations.append((artefact["SPDXID"], relation, part["SPDXID"]))
    made = datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc)
    everything = hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()
    document = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": "moed-" + version,
        "documentNamespace": "https://moed.example/spdx/%s-%s" % (version, everything[:32]),
        "creationInfo": {"created": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
                         "creators": ["Tool: deploy/sbom.py-" + version]},
        "packages": [packages[key] for key in sorted(packages)],
        "relationships": [{"spdxElementId": a, "relationshipType": r, "relatedSpdxElement": b}
                          for a, r, b in sorted(relations)],
    }
    with open(os.path.join(folder, "moed-%s.spdx.json" % version), "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
