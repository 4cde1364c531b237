#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints a Secret with a new token for the daemons of a group, and the roles of all callers: who has the
# token may do everything, others may send forward passes. Arguments: the worker_ids of the group.
#
#   deploy/kubernetes/token.sh moed-worker-0 moed-worker-1 | kubectl apply -f -
set -eu
[ $# -gt 0 ] || { sed -n '3,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
token=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
digest=$(printf %s "$token" | sha256sum | cut -d ' ' -f 1)
ids=$(printf '"%s", ' "$@")
cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: moed-token
stringData:
  token: $token
  access.json: |
    { "identities": { "anonymous": { "roles": ["client"] } },
      "tokens": { "group": { "sha256": "$digest",
        "roles": ["client", "trainer", "worker", "admin", "metrics"], "worker_ids": [${ids%, }] } } }
END
