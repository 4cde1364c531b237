# SPDX-License-Identifier: Apache-2.0
"""A client that calls one worker without pause until it is killed. Each call is a line of JSON on
stdout.

  caller.py BUILD MODELS ENDPOINT FAMILY forward [golden]     golden: compares the answers
  caller.py BUILD MODELS ENDPOINT FAMILY train
  caller.py BUILD MODELS ENDPOINT FAMILY save PREFIX

`train` repeats a Backward and an OptimizerStep under their ids until they are answered, then goes
on to the next. `save` does so with checkpoints PREFIX1, PREFIX2 and so on; a step id that was
forgotten is replaced. Times are of the monotonic clock, which all processes of the machine share.
"""

import itertools
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402

from group import golden_cases, relative_error  # noqa: E402
from training import Trainer, golden_gradients  # noqa: E402
import wire  # noqa: E402
from wire import training  # noqa: E402

PAUSE_S = 0.02  # after a failure
PACE_S = 0.002  # after a step
IDS = 1000  # step ids of a training loop are multiples; those between are for Saves


LAST = {}  # what was seen last


def observe(name, number, call):
    """Prints what became of the call. Returns its answer, or None."""
    seen = LAST
    seen.clear()
    seen.update(call=name, number=number, sent=time.monotonic())
    answer = None
    try:
        answer = call()
        seen["version"] = getattr(answer, "weights_version", 0)
        seen["lineage"] = getattr(answer, "lineage", 0)
        seen["steps"] = getattr(answer, "steps", 0)
        seen["repeated"] = getattr(answer, "repeated", False)
    except grpc.RpcError as error:
        seen["code"], seen["reason"] = error.code().name, wire.error_reason(error)[0]
        seen["text"] = error.details()
    seen["done"] = time.monotonic()
    print(json.dumps(seen), flush=True)
    if seen.get("code") == "INVALID_ARGUMENT":
        sys.exit("a call is wrong: " + seen["text"])
    if answer is None:
        time.sleep(PAUSE_S)
    return answer


def repeat(name, number, call):
    answer = None
    while answer is None:
        answer = observe(name, number, call)
    return answer


def forward(trainer, family, golden=None):
    layer, _, x, y = next(golden_cases(family))
    x = np.ascontiguousarray(x, np.float32)
    for number in itertools.count(1):
        answer = observe("Forward", number, lambda: trainer.forward(layer, x))
        if golden is not None and answer is not None:
            got = np.frombuffer(answer.y_data, np.float32).reshape(y.shape)
            if relative_error(got, y) > 1e-5:
                sys.exit("a wrong answer")


def train(trainer, family):
    layer, x, dy = next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(family)
                        if tokens == 37)
    routing = repeat("Forward", 0, lambda: trainer.forward(layer, x))
    first = repeat("GetTrainState", 0, trainer.state).last_step_id // IDS + 1
    for number in itertools.count(first):
        repeat("Backward", number,
               lambda: trainer.backward(layer, dy, x, routing, batch=number))
        repeat("OptimizerStep", number,
               lambda: trainer.optimizer_step(1e-4, step=IDS * number, expected_backwards=1))
        time.sleep(PACE_S)


def save(trainer, _, prefix):
    step = None
    for number in itertools.count(1):
        answer = None
        while answer is None:
            if step is None:
                step = repeat("GetTrainState", number, trainer.state).last_step_id + 1
            answer = observe("SaveCheckpoint", number, lambda: trainer.call(
                "SaveCheckpoint", training.SaveCheckpointRequest(
                    step_id=step, name=prefix + str(number))))
            if answer is not None or LAST.get("code") == "ALREADY_EXISTS":
                step = None
            if LAST.get("reason") == "CHECKPOINT_EXISTS":
                break


def main():
    endpoint, family, what, *arguments = sys.argv[1:]
    trainer = Trainer(endpoint, "%s-%d" % (what, os.getpid()))
    {"forward": forward, "train": train, "save": save}[what](
        trainer, family, *arguments)


if __name__ == "__main__":
    main()
