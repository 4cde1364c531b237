#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Holds tracked files and commit subjects to the project's format; prints each violation, and exits
# non-zero if there is one.
#
#   tests/format.sh [--fix]
#
#   --fix   mends what a program can: the layout of C and CUDA, blanks at ends of lines
#
# C and CUDA are laid out by clang-format 14, which Debian 12 and Ubuntu 24.04 both have as
# clang-format-14; another version lays out some lines differently and is refused.
set -eu

cd "$(dirname "$0")/.."
LC_ALL=C.UTF-8
export LC_ALL
case ${1-} in
    ''|--fix) ;;
    -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "usage: $0 [--fix]" >&2; exit 2 ;;
esac
# Commits up to this one keep the subjects that they have.
rule_begins=7b4d17d
failed=0

# check WHAT COMMAND...: the command prints the violations, and nothing where there are none. Its
# status says nothing: each grep in it fails when it finds nothing, and must not end it.
check() {
    what=$1
    shift
    found=$(set +e; "$@" 2>&1) || true
    [ -n "$found" ] || { echo "ok      $what"; return 0; }
    echo "FAILED  $what"
    printf '%s\n' "$found" | sed 's/^/        /'
    failed=1
}

c_files() {
    git ls-files -z -- '*.c' '*.h' '*.cu' '*.cuh'
}

layout() {
    c_files | xargs -0 -P 2 -n 50 "$formatter" --dry-run 2>&1 | grep ': warning:'
}

blanks() {
    git grep -nIE '[[:blank:]]+$'
}

tabs() {
    git grep -nIP '^ *\t' -- '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.sh' '*.cmake' '*CMakeLists.txt' \
        '*.proto'
}

# Scripts have tables of commands, one a line. Pages have tables, which no line can break, and code.
long_lines() {
    git grep -nIP '^(?! {4})(?!\|).{121,}' -- '*.md' ':!tests/golden/data'
    git grep -nIE '^.{101,}' -- '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.cmake' '*CMakeLists.txt' \
        '*.proto'
    git grep -nIE '^.{121,}' -- '*.sh' '.ci/*'
}

last_lines() {
    git grep -lI '' | while read -r file; do
        [ ! -s "$file" ] || [ -z "$(tail -c 1 "$file")" ] || echo "$file: the last line has no end"
    done
}

# "area: what the commit does", at most 72 characters.
subjects() {
    git log --no-merges --format='%h %s' "$rule_begins..HEAD" |
        grep -vE '^[0-9a-f]+ [a-z0-9_.-]+(, [a-z0-9_.-]+)*: [^ ].{0,}[^.]$'
    git log --no-merges --format='%h %s' "$rule_begins..HEAD" |
        grep -E '^[0-9a-f]+ .{73,}$'
}

formatter=
for name in clang-format-14 clang-format; do
    if "$name" --version 2>/dev/null | grep -q 'version 14\.'; then
        formatter=$name
        break
    fi
done
[ -n "$formatter" ] || { echo "$0: clang-format 14 is not installed" >&2; exit 2; }

if [ "${1-}" = --fix ]; then
    c_files | xargs -0 -P 2 -n 50 "$formatter" -i
    blanks | cut -d : -f 1 | sort -u | xargs -r sed -i 's/[[:blank:]]*$//'
fi
check "layout of C and CUDA ($formatter)" layout
check "no blanks at ends of lines" blanks
check "no tabs before code" tabs
check "at most 100 columns, 120 in scripts and pages" long_lines
check "ends of last lines" last_lines
if git cat-file -e "$rule_begins^{commit}" 2>/dev/null; then
    check "commit subjects: 'area: what it does', at most 72 characters" subjects
else
    echo "skipped commit subjects: this clone has no history"
fi
exit $failed
