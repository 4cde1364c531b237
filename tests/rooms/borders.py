# SPDX-License-Identifier: Apache-2.0
"""Holds the compiler to rooms.txt: what a room may not see must not compile.

  borders.py BUILD_DIRECTORY [--without-cuda] [--open ROOM:OTHER]

Takes the include directories with which a room's sources are really compiled. For each pair of
rooms that must not see each other it plants an include of a header that exists, and expects the
compiler's refusal; what a room may see must be found. --open adds OTHER's directory to ROOM's and
so breaks a border: a check of this check."""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from house import ROOT, read_table

BATCH = 40  # sources that one run of the compiler takes


def flags_by_folder(build):
    """Per folder of sources, the sets of include directories of rooms, and a compiler of C."""
    folders, compiler = collections.defaultdict(set), None
    for command in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(command["command"])
        source = pathlib.Path(os.path.realpath(os.path.join(command["directory"], command["file"])))
        try:
            folder = str(source.parent.relative_to(ROOT))
        except ValueError:
            continue
        # Ninja names an output from the build directory, make from that of its CMakeLists.txt.
        output = os.path.join(command["directory"], words[words.index("-o") + 1])
        if output.startswith(f"{build}/tests/") and not folder.startswith("tests"):
            continue  # a source of a room that a test compiles for itself
        if source.suffix == ".c":
            compiler = next(w for w in words if not re.search(r"(^|/)(ccache|sccache)$", w))
        text = command["command"]
        # nvcc reads its options from files where make is the generator.
        for file in re.findall(r"--options-file (\S+)", text):
            text += pathlib.Path(command["directory"], file).read_text()
        directories = re.findall(re.escape(str(build / "rooms")) + r"/[^\s\"/]+", text)
        folders[folder].add(tuple(sorted(set(directories))))
    return folders, compiler


def a_header(room):
    """Some header of a room, as others would include it."""
    headers = sorted((ROOT / room.folder).glob("*.h"), key=lambda p: (p.stat().st_size, p.name))
    return f"{room.prefix}/{headers[0].name}" if room.prefix and headers else None


def refused(compiler, directories, sources):
    """Those of `sources` that have an include that the compiler does not find."""
    run = subprocess.run(
        [compiler, "-fsyntax-only", "-w", *[f"-I{d}" for d in directories], *sources],
        capture_output=True,
        text=True,
        env={
            **os.environ, "LC_ALL": "C"
        })
    return {
        s
        for s in sources
        if re.search(re.escape(s) + r":1:\d+: fatal error: .*(No such file|not found)", run.stderr)
    }


def plant(scratch, room, other, header):
    path = os.path.join(scratch, f"{room.name}-{other.name}.c")
    pathlib.Path(path).write_text(f'#include "{header}"\nint planted;\n')
    return path


def check_seen(compiler, directories, headers):
    """What a room may see but does not find: one run for all, which includes nothing."""
    text = "".join(f'#if !__has_include("{h}")\nmissing "{h}"\n#endif\n' for h in headers)
    run = subprocess.run([compiler, "-E", "-P", "-xc", "-", *[f"-I{d}" for d in directories]],
                         input=text, capture_output=True, text=True, check=True)
    return re.findall(r'missing "(.*)"', run.stdout)


def check_room(compiler, scratch, room, directories, headers, rooms):
    """(number of planted includes, complaints) of one room with one set of directories."""
    planted = {plant(scratch, room, rooms[o], headers[o]): o for o in headers
               if o != room.name and o not in room.sees}
    sources, found = sorted(planted), []
    stopped = set()
    for first in range(0, len(sources), BATCH):
        stopped |= refused(compiler, directories, sources[first:first + BATCH])
    for source in sources:
        if source not in stopped:
            found.append(
                f'{room.name} sees {planted[source]}: #include "{headers[planted[source]]}" '
                "compiles")
    seen = [headers[o] for o in sorted(room.sees) if o in headers]
    for header in check_seen(compiler, directories, seen):
        found.append(f'{room.name} may see "{header}", and does not find it')
    return len(sources), found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--without-cuda", action="store_true")
    parser.add_argument("--open", metavar="ROOM:OTHER")
    options = parser.parse_args()
    build = options.build.resolve()
    rooms = read_table()
    headers = {r.name: a_header(r) for r in rooms.values()}
    headers = {name: h for name, h in headers.items() if h}
    folders, compiler = flags_by_folder(build)
    if options.without_cuda:  # cuda/plan is built all the same
        rooms = {n: r._replace(sees={s for s in r.sees
                                     if s == "cuda_plan" or not s.startswith("cuda_")})
                 for n, r in rooms.items()}
    complaints, jobs = [], []
    with tempfile.TemporaryDirectory() as scratch, \
            concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for room in rooms.values():
            sets = folders.get(room.folder)
            if not sets:
                skipped = options.without_cuda and (room.name.startswith("cuda_")
                                                    or room.name.endswith("_cuda"))
                if not skipped and any((ROOT / room.folder).glob("*.c")):
                    complaints.append(f"{room.name}: no source of {room.folder} is compiled")
                continue
            for directories in sets:
                if options.open and options.open.startswith(room.name + ":"):
                    directories += (str(build / "rooms" / options.open.split(":")[1]),)
                # If a room's main has fewer directories than its others, it may see less.
                jobs.append(pool.submit(check_room, compiler, scratch, room._replace(
                    sees=room.sees if len(sets) == 1 or directories == max(sets, key=len)
                    else {s for s in room.sees if str(build / "rooms" / s) in directories}),
                    directories, headers, rooms))
        planted = 0
        for job in jobs:
            number, found = job.result()
            planted += number
            complaints += found
    for folder in sorted(folders):
        if folder.split("/")[0] in ("kernels", "daemon", "client") and \
                folder not in {r.folder for r in rooms.values()}:
            complaints.append(f"{folder} is compiled and is no room of rooms.txt")
    print("\n".join(complaints) or f"{planted} wrong includes, all refused")
    return 1 if complaints or planted == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
