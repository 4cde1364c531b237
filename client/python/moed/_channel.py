# SPDX-License-Identifier: Apache-2.0
"""Opens channels to workers and coordinators."""

import grpc


def open_channel(endpoint, options=()):
    """A channel without encryption. It ignores http_proxy, as libmoeclient does: a proxy seldom
    reaches a group, and its error would name the wrong address."""
    return grpc.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0), *options])
