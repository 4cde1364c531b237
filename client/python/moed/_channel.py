# SPDX-License-Identifier: Apache-2.0
"""How a channel to a worker or a coordinator is opened."""

import grpc


def open_channel(endpoint, options=()):
    """A channel without encryption. It ignores http_proxy, as libmoeclient does: a group is on a
    network of its own, and an error of the proxy would name the wrong address."""
    return grpc.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0), *options])
