# SPDX-License-Identifier: Apache-2.0
"""daemon/CONCURRENCY.md names every thread and every mutex of the product, and nothing else.

    concurrency_page.py ROOT

Compares, and then shows that it would notice what is missing.
"""
import pathlib
import re
import sys

ROOMS = ("daemon", "kernels", "client")
OWN = ("kernels/base/mutex.h", "kernels/base/wait.h", "kernels/base/thread.c",
       "kernels/base/thread.h")
NAME_MAX = 15


def read_sources(root):
    """{path: text without comments} of the product's C files."""
    found = {}
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in (".c", ".h", ".cu", ".cuh") and name not in OWN:
                found[name] = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.S)
    return found


def mutexes_of(sources):
    """Names as the page has them: struct.field, or file.c:variable."""
    names = set()
    for path, text in sources.items():
        for m in re.finditer(r"^static struct moe_mutex (\w+)", text, re.M):
            names.add(f"{path.rsplit('/', 1)[-1]}:{m[1]}")
        for m in re.finditer(r"^struct (\w+) \{\n(.*?)^\}", text, re.M | re.S):
            for field in re.finditer(r"^ +struct moe_mutex (\w+)", m[2], re.M):
                names.add(f"{m[1]}.{field[1]}")
    return names


def threads_of(sources):
    """(names, complaints). A thread pool's name is where the pool is made."""
    names, complaints = set(), []
    for path, text in sources.items():
        for m in re.finditer(r"\bmoe_(thread|thread_pool)_create\((.*?)\)", text, re.S):
            literal = re.search(r'"([^"]*)"', m[2])
            if literal and len(literal[1]) <= NAME_MAX:
                names.add(literal[1])
            elif literal:
                complaints.append(
                    f"{path}: the name {literal[1]} has more than {NAME_MAX} characters")
            elif not path.startswith("kernels/base/"):
                complaints.append(f"{path}: a thread without a name that can be read here")
        for word in ("pthread_create", "pthread_mutex_t", "pthread_mutex_lock",
                     "pthread_setname_np"):
            if re.search(rf"\b{word}\b", text):
                complaints.append(
                    f"{path}: {word}, where base/mutex.h and base/thread.h should be used")
    return names, complaints


def rows_of(page, title):
    """First cells of the table under a title."""
    part = page.split(f"\n## {title}\n", 1)
    if len(part) < 2:
        sys.exit(f"daemon/CONCURRENCY.md has no section '{title}'")
    text = part[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.M))


def orders_of(page):
    """{mutex: those that may be taken while it is held}."""
    text = page.split("\n## Mutexes\n", 1)[1].split("\n## ", 1)[0]
    return {m[1]: set(re.findall(r"`([^`]+)`", m[2]))
            for m in re.finditer(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|", text, re.M)}


def check_orders(orders):
    """Every name has a row, and no mutex can be taken while it is held."""
    complaints = [f"the page: {inner}, taken under {outer}, has no row"
                  for outer, inners in orders.items() for inner in inners if inner not in orders]

    def visit(name, path):
        if name in path:
            complaints.append("the page: a circle: " + " > ".join(path + [name]))
            return
        for inner in sorted(orders.get(name, ())):
            visit(inner, path + [name])

    for name in sorted(orders):
        visit(name, [])
    return complaints


def compare(sources, page):
    threads, complaints = threads_of(sources)
    for kind, there, listed in (("thread", threads, rows_of(page, "Threads of ours")),
                              ("mutex", mutexes_of(sources), rows_of(page, "Mutexes"))):
        complaints += [f"the {kind} {n} is not on the page" for n in sorted(there - listed)]
        complaints += [
            f"the page has a {kind} {n} that does not exist" for n in sorted(listed - there)]
    return complaints + check_orders(orders_of(page))


def self_test(sources, page):
    """Takes one thing away, or adds one, and expects a complaint."""
    assert len(mutexes_of(sources)) >= 30 and len(threads_of(sources)[0]) >= 12
    changes = [
        (dict(sources, **{"daemon/x.c": 'moe_thread_create(&t, "moe-new", f, x);'}), page),
        (dict(sources, **{"daemon/x.c": 'moe_thread_create(&t, "moe-much-too-long", f, x);'}),
         page),
        (dict(sources, **{"daemon/x.c": "pthread_create(&t, NULL, f, x);"}), page),
        (dict(sources, **{"daemon/x.c": "struct moe_new {\n    struct moe_mutex lock;\n};"}), page),
        (dict(sources, **{"daemon/x.c": "static struct moe_mutex gate = MOE_MUTEX_INITIALIZER;"}),
         page),
        (sources, page.replace("| `moe-engine` |", "| moe-engine |")),
        (sources, page.replace("| `moe_gather.lock` |", "| moe_gather.lock |")),
        (sources, page.replace("\n## Mutexes\n",
         "\n## Mutexes\n\n| `moe_gone.lock` | nothing | leaf |\n")),
        (sources, re.sub(r"(\| `moe_listener.lock` \|[^|]*\|) leaf", r"\1 `moe_peers.lock`",
         page)),
    ]
    for number, (changed, with_page) in enumerate(changes):
        if not compare(changed, with_page):
            sys.exit(f"change {number} of the self-test is not noticed")
    print(f"{len(changes)} changes are noticed")


def main():
    root = pathlib.Path(sys.argv[1])
    sources, page = read_sources(root), (root / "daemon/CONCURRENCY.md").read_text()
    complaints = compare(sources, page)
    if complaints:
        sys.exit("\n".join(complaints))
    self_test(sources, page)


if __name__ == "__main__":
    main()
