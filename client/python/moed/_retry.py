# SPDX-License-Identifier: Apache-2.0
"""Waits for a group that cannot answer now: growing pauses until the call's time is over, warnings
in the log meanwhile, and the error at the end."""

import logging
import random
import time

import grpc

from . import _errors
from ._channel import open_channel
from ._proto import admin_pb2

_PAUSE_FIRST, _PAUSE_MAX = 0.01, 1.0
_SILENCE = 5.0  # seconds of waiting before the first warning; then twice as long, and so on
_PROBE = 1.0  # seconds for the coordinator's status call
_PROBE_MIN = 0.05  # with less time left there is no status call

_log = logging.getLogger("moed")  # without a configuration, warnings go to stderr


def _ask_coordinator(endpoint, trust, seconds):
    """The group's state for a message; "" if `seconds` do not suffice to find it out."""
    seconds = min(seconds, _PROBE)
    if not endpoint or seconds < _PROBE_MIN:
        return ""
    with open_channel(endpoint, trust) as channel:
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
    """The attempts of one call. All but the last fail with UNAVAILABLE.

    client    moed.Client
    what      the call's name, for messages
    limit     seconds for all attempts; None: no limit while a worker executes the call. If no
              worker answers for the client's timeout, the call fails
    attempts  limit on their number; None: none
    budget    no attempt begins later than so many seconds after the call; None: no such limit
    others    so many further workers are tried without a pause
    each      with `others`: seconds for an attempt that is not the last one, twice as many each
              time all workers have been asked; None: no such limit
    """

    def __init__(self, client, what, limit, attempts=None, budget=None, others=0, each=None):
        self._client, self._what, self._attempts = client, what, attempts
        self._limit = _errors.limit(limit)
        self._budget, self._others, self._refused = budget, others, 0
        self._each, self._limited = each if others else None, False
        self._begun = self._tried = self._alone = time.monotonic()
        self._say_at = self._begun + _SILENCE
        self._pauses = 0
        self._missed = None  # the last failure that was retried
        self._coordinator_text = ""  # the coordinator's last text

    def left(self):
        """Seconds for the attempt that begins now; None: no limit."""
        self._tried = time.monotonic()
        left = None if self._limit is None else max(self._begun + self._limit - self._tried, 0)
        self._limited = False
        if self._each is not None:
            each = self._each * 2**min(self._pauses // (self._others + 1), 30)
            end = self._tried + each
            last = (self._pauses + 1 == self._attempts
                    or left is not None and each >= left
                    or self._budget is not None and end >= self._begun + self._budget)
            self._limited = not last
        return each if self._limited else left

    def judge(self, failure):
        """The failure of an attempt: a worker that has not answered in the attempt's time counts as
        one that refuses."""
        if self._limited and failure.code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return _errors.MoeError(grpc.StatusCode.UNAVAILABLE, "",
                                    "no answer within attempt_time", worker=failure.worker)
        return failure

    def wait_or_raise(self, failure, endpoint, once=False):
        """An attempt at the worker `endpoint` has failed with this MoeError. Returns when it is
        time for the next attempt. If there is none (also with `once`), raises the error with
        details."""
        now = time.monotonic()
        if now - self._tried > self._client._timeout:
            self._alone = now  # a worker has executed it for all that time
        end = (self._alone + self._client._timeout if self._limit is None
               else self._begun + self._limit)
        if self._budget is not None:
            end = min(end, self._begun + self._budget)
        half = min(_PAUSE_FIRST * 2**min(self._pauses, 10), _PAUSE_MAX) / 2
        pause = (failure.retry_after or half) + random.uniform(0, half)
        self._pauses += 1
        self._refused = (self._refused + 1) % (self._others + 1)
        if self._refused:  # another worker has not been asked yet
            pause = 0
        if (failure.code != grpc.StatusCode.UNAVAILABLE or once or now + pause >= end
                or self._pauses == self._attempts):
            raise self._final(failure, endpoint, now)
        if now >= self._say_at:
            waited = now - self._begun
            self._say_at = now + 2 * (self._say_at - self._begun)
            _log.warning(
                "moed: %s has been waiting for %.0f s and gives up in %.0f s: "
                "%s", self._what, waited, end - now, self._why(failure, endpoint,
                                                               end - now - pause))
        self._missed = failure
        time.sleep(max(now + pause - time.monotonic(), 0))

    def _why(self, failure, endpoint, seconds):
        """The worker's text, the coordinator's (the last one if it does not answer in that time),
        and a command that shows more."""
        coordinator = self._client.info.coordinator
        text = _ask_coordinator(coordinator, self._client._trust, seconds) or self._coordinator_text
        self._coordinator_text = text
        silent = not failure.reason  # the worker does not answer
        hint = "`moectl status --endpoint %s`" % (coordinator if silent and coordinator
                                                  else endpoint)
        return "%s; %s" % (failure.message, "%s; %s shows it" % (text, hint) if text else
                           "%s may show more" % hint)

    def _final(self, failure, endpoint, now):
        """`failure` with details for the caller."""
        message = failure.message
        left = _PROBE if self._limit is None else self._begun + self._limit - now
        if failure.code == grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
            message = "%s had no answer within its time limit (timeout=%g s)" % (
                self._what, self._limit if self._limit is not None else now - self._begun)
            if self._missed is not None:
                message += "; " + self._why(self._missed, endpoint, left)
        elif failure.code == grpc.StatusCode.UNAVAILABLE and now - self._begun >= _SILENCE:
            message = "%s was given up after %.0f s: %s" % (
                self._what, now - self._begun, self._why(failure, endpoint, left))
        return _errors.MoeError(failure.code, failure.reason, message, failure.retry_after,
                                failure.worker)
