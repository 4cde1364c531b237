# SPDX-License-Identifier: Apache-2.0
"""Holds the product's folders and files to their sizes, and its includes to one direction.

  no folder has more than 30 source files, no file more than 900 lines
  no include climbs ("../")
  no circle of files: a file is a source with its header; headers without sources
  belong to the files that include them, so a circle counts where two or more sources are in it
  gRPC's headers only in daemon/rpc, CUDA's and NCCL's only in kernels/cuda, client/cuda and the
  example of a frontend with a GPU
  every room has a README.md, and the files in its tables exist"""
import collections
import pathlib
import re
import sys

from house import PRODUCT, ROOT, includes, read_table, resolve, tracked

FILES_MAX, LINES_MAX = 30, 900
SOURCES = {".c", ".h", ".cu", ".cuh", ".S", ".py", ".proto"}
C_LIKE = {".c", ".h", ".cu", ".cuh"}
OUTSIDE = (  # headers, and the only folders that may include them
    (re.compile(r"<grpc/"), ("daemon/rpc/",)),
    (re.compile(r"<(cuda|nccl|cublas|nvtx)"),
     ("kernels/cuda/", "client/cuda/", "client/examples/attention/")),
)


def check_sizes(files):
    count = collections.Counter(str(f.parent) for f in files)
    for folder, n in sorted(count.items()):
        if n > FILES_MAX:
            yield f"{folder} has {n} source files; at most {FILES_MAX}"
    for f in files:
        lines = (ROOT / f).read_text().count("\n")
        if lines > LINES_MAX:
            yield f"{f} has {lines} lines; at most {LINES_MAX}"


def check_includes(files):
    for f in files:
        if any(".." in pathlib.Path(i).parts for i in includes(f)):
            yield f'{f} includes by "../"'
        for name in re.findall(r"(?m)^\s*#\s*include\s+(<[^>]+>)", (ROOT / f).read_text()):
            for header, folders in OUTSIDE:
                if header.match(name) and not str(f).startswith(folders):
                    yield f"{f} includes {name}, which only {' and '.join(folders)} may"


def components(graph):
    """Strongly connected parts of more than one node (Tarjan, without recursion)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, following = work[-1]
            for n in following:
                if n not in index:
                    index[n] = low[n] = len(index)
                    stack.append(n)
                    on_stack.add(n)
                    work.append((n, iter(sorted(graph.get(n, ())))))
                    break
                if n in on_stack:
                    low[node] = min(low[node], index[n])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = stack[stack.index(node):]
                    del stack[stack.index(node):]
                    on_stack -= set(part)
                    if len(part) > 1:
                        found.append(part)
    return found


def check_circles(files, include=None):
    """`include`: yields (including file, included file) in place of what the files say."""
    rooms = read_table()
    if include is None:
        include = ((f, resolve(rooms, f, i)) for f in files for i in includes(f))
    graph = collections.defaultdict(set)
    for f, target in include:
        if target is not None and target.with_suffix("") != f.with_suffix(""):
            graph[f.with_suffix("")].add(target.with_suffix(""))
    sources = {f.with_suffix("") for f in files if f.suffix in (".c", ".cu")}
    for part in components(graph):
        code = sorted(str(p) for p in part if p in sources)
        if len(code) > 1:
            yield "a circle of files: " + ", ".join(code)


def check_readmes():
    for room in read_table().values():
        readme = ROOT / room.folder / "README.md"
        if not readme.is_file():
            yield f"{room.folder} has no README.md"
            continue
        for row in re.findall(r"(?m)^\| (`[^|]*) \|", readme.read_text()):
            for name in re.findall(r"`([\w/]+\.(?:c|h|cu|cuh))`", row):
                if not (readme.parent / name).is_file():
                    yield f"{room.folder}/README.md lists {name}, which is not there"


def main():
    files = [f for f in tracked(*PRODUCT) if f.suffix in SOURCES]
    code = [f for f in files if f.suffix in C_LIKE]
    tests = [f for f in tracked("tests") if f.suffix in SOURCES]
    complaints = [
        *check_sizes(files), *check_includes(code), *check_circles(code), *check_readmes()
    ]
    complaints += [
        c for c in check_includes([t for t in tests if t.suffix in C_LIKE]) if '"../"' in c
    ]
    # The check itself: a circle of two sources is one, a source with its own parts is none.
    a, b, state = (pathlib.Path(n) for n in ("x/a.h", "x/b.h", "x/state.h"))
    two = [a.with_suffix(".c"), b.with_suffix(".c")]
    if not list(check_circles(two, [(two[0], b), (two[1], a)])) or \
            list(check_circles(two, [(two[0], state), (state, a)])):
        complaints.append("circles are not seen as they are")
    print("\n".join(complaints) or f"{len(files)} files in order")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
