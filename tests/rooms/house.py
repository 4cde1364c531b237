# SPDX-License-Identifier: Apache-2.0
"""What the checks of rooms share: the table, the product's sources, and what includes mean."""
import collections
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRODUCT = ("proto", "kernels", "daemon", "client")

Room = collections.namedtuple("Room", "name folder prefix sees")


def read_table(path=pathlib.Path(__file__).with_name("rooms.txt")):
    """Rooms by name, as rooms.txt lists them. A prefix of "-" means that the room has none."""
    rooms = {}
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        left, _, right = line.partition(":")
        name, folder, prefix = left.split()
        rooms[name] = Room(name, folder, None if prefix == "-" else prefix, set(right.split()))
    for room in rooms.values():
        for seen in room.sees:
            assert seen in rooms, f"rooms.txt: {room.name} names {seen}, which is no room"
    return rooms


def tracked(*folders):
    """Files of these folders that git knows or would add; all files where there is no
    repository."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", *folders],
                            capture_output=True, text=True)
    if listed.returncode == 0:
        names = [pathlib.Path(n) for n in listed.stdout.splitlines()]
        return sorted(n for n in names if (ROOT / n).is_file())
    return sorted(
        p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*") if p.is_file())


def includes(path):
    """What a file includes in quotes, in order."""
    return re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', (ROOT / path).read_text())


def resolve(rooms, path, name):
    """The file of the product that `path` means by #include "name"; None: none of it."""
    sibling = path.parent / name
    if (ROOT / sibling).is_file():
        return sibling
    for room in rooms.values():
        if room.prefix and name.startswith(room.prefix + "/"):
            found = pathlib.Path(room.folder) / name[len(room.prefix) + 1:]
            if (ROOT / found).is_file():
                return found
    return None
