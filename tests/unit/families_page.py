# SPDX-License-Identifier: Apache-2.0
"""The table of daemon/model/README.md has every model_type that daemon/model accepts, and no other
one. Families of moed.transformers are among them.

    families_page.py ROOT

Compares, and then shows that it would notice what is missing.
"""
import pathlib
import re
import sys

SOURCE, PAGE = "daemon/model/families.c", "daemon/model/README.md"
BLOCKS = "client/python/moed/transformers.py"


def accepted(source):
    """The model_types of the rows."""
    rows = re.findall(r"\.model_types = ((?:\"[^\"]*\"\s*)+),", source)
    return {word for row in rows for word in " ".join(re.findall('"([^"]*)"', row)).split()}


def listed(page):
    """Those of the table's first column; `_text` is an end of the name before it."""
    table = re.search(r"^\| model_type \|.*\n(?:\|.*\n)*", page, re.M)
    if table is None:
        sys.exit(f"{PAGE} has no table of model_types")
    names = []
    for line in table[0].splitlines()[2:]:
        for name in re.findall("`([^`]+)`", line.split("|")[1]):
            before = before if name[0] == "_" else name
            names.append(before + name if name[0] == "_" else name)
    return names


def compare(source, page, blocks):
    """Complaints."""
    code, names = accepted(source), listed(page)
    table = set(names)
    yield from (f"{PAGE} lists {name} twice" for name in sorted(table) if names.count(name) > 1)
    yield from (f"{PAGE} lacks {name}" for name in sorted(code - table))
    yield from (f"{PAGE} has {name}, which {SOURCE} does not accept"
                for name in sorted(table - code))
    families = set(re.findall(r'_Block\("(\w+)"', blocks))
    yield from (f"{BLOCKS} has {name}, which {SOURCE} does not accept"
                for name in sorted(families - code))


def main(root):
    source, page, blocks = ((root / name).read_text() for name in (SOURCE, PAGE, BLOCKS))
    complaints = list(compare(source, page, blocks))
    print(f"{len(accepted(source))} model types, {len(complaints)} complaints")
    for complaint in complaints:
        print(complaint)
    for name in ("olmoe", "qwen3_vl_moe_text"):  # it notices a type that only one side has
        assert any(name in c for c in compare(source.replace(name, "other"), page, blocks)), name
    assert any("lacks jamba" in c for c in compare(source, page.replace("`jamba`", ""), blocks))
    assert any(BLOCKS in c for c in compare(source, page, blocks + '_Block("other")'))
    return 1 if complaints else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(pathlib.Path(sys.argv[1])))
