# SPDX-License-Identifier: Apache-2.0
"""How a call waits for a group that cannot answer it now: pauses that grow, until its time is over,
and what is said meanwhile, to the log and in the error at the end."""

import logging
import random
import time

import grpc

from . import _errors
from ._channel import open_channel
from ._proto import admin_pb2

_PAUSE_FIRST, _PAUSE_MAX = 0.01, 1.0
_SILENCE = 5.0  # seconds of waiting before the first word about it; then twice as long, and so on
_PROBE = 1.0  # seconds that the coordinator has to say what is the matter
_PROBE_MIN = 0.05  # it is not asked where less time is left

_log = logging.getLogger("moed")  # without a configuration of its own, warnings go to stderr


def _ask_coordinator(endpoint, seconds):
    """What is the matter with the group, in words; "" where that cannot be found out in that
    time."""
    seconds = min(seconds, _PROBE)
    if not endpoint or seconds < _PROBE_MIN:
        return ""
    with open_channel(endpoint) as channel:
        call = channel.unary_unary(
            "/moe.v1.AdminService/GetStatus",
            request_serializer=admin_pb2.GetStatusRequest.SerializeToString,
            response_deserializer=admin_pb2.GetStatusResponse.FromString)
        try:
            status = call(admin_pb2.GetStatusRequest(), timeout=seconds)
        except grpc.RpcError as error:
            if seconds < _PROBE and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return ""  # it may only be slow
            return "its coordinator (%s) does not answer" % endpoint
    state = admin_pb2.GroupState.Name(status.state) if (
        status.state in admin_pb2.GroupState.values()) else str(status.state)
    state = state[len("GROUP_STATE_"):] if state.startswith("GROUP_STATE_") else state
    return "the group is %s%s" % (state, ": " + status.reason if status.reason else "")


class RetryPolicy:
    """The tries of one call, of which all but the last fail with UNAVAILABLE.

    client    moed.Client
    what      the call's name, for a person
    limit     seconds for all of it; None: none, as long as somebody works on the call (a group that
              cannot be reached for the client's timeout is given up)
    attempts  tries at most; None: as many as there is time for
    """

    def __init__(self, client, what, limit, attempts=None):
        self._client, self._what, self._limit, self._attempts = client, what, limit, attempts
        self._begun = self._tried = self._alone = time.monotonic()
        self._say_at = self._begun + _SILENCE
        self._pauses = 0
        self._missed = None  # the last failure that another try was made after
        self._heard = ""  # the coordinator's last word

    def left(self):
        """Seconds for the try that begins now; None: no limit."""
        self._tried = time.monotonic()
        return None if self._limit is None else max(self._begun + self._limit - self._tried, 0)

    def wait_or_raise(self, failure, endpoint, once=False):
        """Returns when it is time for another try, after one at the worker `endpoint` that ended
        with this MoeError; where there is to be none (`once`), raises it, with what is known."""
        now = time.monotonic()
        if now - self._tried > self._client._timeout:
            self._alone = now  # somebody has worked on it for all that time
        end = (self._alone + self._client._timeout if self._limit is None
               else self._begun + self._limit)
        half = min(_PAUSE_FIRST * 2**min(self._pauses, 10), _PAUSE_MAX) / 2
        pause = (failure.retry_after or half) + random.uniform(0, half)
        self._pauses += 1
        if (failure.code != grpc.StatusCode.UNAVAILABLE or once or now + pause >= end
                or self._pauses == self._attempts):
            raise self._final(failure, endpoint, now)
        if now >= self._say_at:
            waited = now - self._begun
            self._say_at = now + 2 * (self._say_at - self._begun)
            _log.warning(
                "moed: %s has been waiting for %.0f s, and gives up after another %.0f s: "
                "%s", self._what, waited, end - now, self._why(failure, endpoint,
                                                               end - now - pause))
        self._missed = failure
        time.sleep(max(now + pause - time.monotonic(), 0))

    def _why(self, failure, endpoint, seconds):
        """The worker's word, the coordinator's (the last one, where it has none in that time), and
        where to look."""
        coordinator = self._client.info.coordinator
        said = self._heard = _ask_coordinator(coordinator, seconds) or self._heard
        silent = not failure.reason  # nobody answers at the worker's address
        hint = "`moectl status --endpoint %s`" % (coordinator if silent and coordinator
                                                  else endpoint)
        return "%s; %s" % (failure.message, "%s; %s shows it" % (said, hint) if said else
                           "%s may tell more" % hint)

    def _final(self, failure, endpoint, now):
        """`failure` as the caller is to see it, within the call's time."""
        message = failure.message
        left = _PROBE if self._limit is None else self._begun + self._limit - now
        if failure.code == grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
            message = "%s had no answer within its time (timeout=%g s)" % (
                self._what, self._limit if self._limit is not None else now - self._begun)
            if self._missed is not None:
                message += "; " + self._why(self._missed, endpoint, left)
        elif failure.code == grpc.StatusCode.UNAVAILABLE and now - self._begun >= _SILENCE:
            message = "%s was given up after %.0f s: %s" % (
                self._what, now - self._begun, self._why(failure, endpoint, left))
        return _errors.MoeError(failure.code, failure.reason, message, failure.retry_after,
                                failure.worker)
