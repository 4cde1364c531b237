# SPDX-License-Identifier: Apache-2.0
"""Added models outlive lost workers, a lost coordinator and calls that break off."""

import concurrent.futures
import json
import os
import tempfile
import time
import unittest

import grpc

from group import freeze, golden_cases, main, model_directory, moectl, relative_error, wait_until
from models_group import (DEFAULT, SECOND, TOLERANCE, Models, Traffic, answers_equal_golden,
                          make_model, spoil)
from training import Trainer, golden_gradients, refusal
from wire import admin


class Faults(unittest.TestCase):
    def test_the_coordinator_is_killed_and_restarted(self):
        with Models(2) as g:
            g.load()
            epoch = g.epoch()
            with Traffic(g) as default, Traffic(g, SECOND, SECOND) as added:
                default.wait_for_more()
                added.wait_for_more()
                g.restart_coordinator()
                wait_until(lambda: g.state_of(SECOND) == "SERVING")
                default.wait_for_more()
                added.wait_for_more()
                self.assertEqual((default.failures, added.failures), ([], []))
            self.assertEqual(g.epoch(), epoch)
            self.assertEqual([each.name for each in g.models()], [DEFAULT, SECOND])
            g.unload()
            g.load("deepseek_v3")
            answers_equal_golden(self, g, "deepseek_v3", "deepseek_v3")

    def test_a_worker_is_killed_and_replaced(self):
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            g.kill_worker(1)
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of(SECOND) == "SERVING")
            answers_equal_golden(self, g, SECOND, SECOND)
            g.unload()

    def test_the_whole_group_is_restarted(self):
        """The state directory has the added models: they are loaded after the default one."""
        with Models(2) as g:
            g.load()
            g.load("deepseek_v3", name="third")
            epoch = g.epoch()
            for process in (*g.workers, g.coordinator):
                process.terminate()
            for process in (*g.workers, g.coordinator):
                self.assertEqual(process.wait(30), 0)
            g.restart_coordinator()
            for slot in range(2):
                g.start_worker(slot)
            g.wait_serving(epoch)
            for model, family in ((SECOND, SECOND), ("third", "deepseek_v3")):
                wait_until(lambda model=model: g.state_of(model) == "SERVING")
                answers_equal_golden(self, g, model, family)

    def test_clients_of_the_added_model_outlive_a_lost_worker(self):
        """They get MODEL_LOADING or another UNAVAILABLE meanwhile, which clients repeat."""
        layer, _, x, y = next(iter(golden_cases(SECOND)))
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            with g.client(model=SECOND, timeout=60) as client:
                g.kill_worker(1)
                g.start_worker(1)
                got = client.forward(layer, x, patient=True)
                self.assertLessEqual(relative_error(got, y), TOLERANCE)
            self.assertGreater(g.epoch(), epoch)

    def test_a_replaced_worker_lacks_the_directory(self):
        """The default model serves; the added one says why it does not, and can be unloaded."""
        with Models(2, "--wait-budget-ms", "500") as g:
            path = g.put("there", model_directory(SECOND))
            g.load(directory=path)
            epoch = g.epoch()
            g.kill_worker(1)
            os.unlink(os.path.join(g.folder(1), "there"))
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of("there") == "FAILED")
            reason = next(each.reason for each in g.models() if each.name == "there")
            print(reason)
            self.assertIn("slot 1", reason)
            checks = json.loads(moectl("health", "-o", "json", "--endpoint", g.address,
                                       check=False).stdout)["checks"]
            self.assertEqual([(each["subject"], each["result"]) for each in checks
                              if each["code"] == "MODEL_SERVING"], [("there", "WARNING")])
            layer, _, x, _ = next(iter(golden_cases(SECOND)))
            for endpoint in g.endpoints:  # also the one that has the model, after two seconds
                t = Trainer(endpoint)
                self.assertEqual(refusal(t.forward, layer, x, model="there")[0],
                                 ("UNAVAILABLE", "MODEL_LOADING"))
                t.close()
            g.unload("there")
            self.assertEqual([each.name for each in g.models()], [DEFAULT])

    def test_a_replaced_worker_has_other_bytes(self):
        """The tensor is named, and the default model serves. All workers may bring the new bytes
        once an operator has accepted them."""
        with Models(2, "--wait-budget-ms", "500") as g:
            copy, tensor = spoil(g, ".experts.7.")
            path = g.put("there", model_directory(SECOND))
            g.load(directory=path)
            epoch = g.epoch()
            g.kill_worker(1)
            for slot in range(2):
                os.unlink(os.path.join(g.folder(slot), "there"))
            g.put("there", copy)
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of("there") == "FAILED")
            reason = next(each.reason for each in g.models() if each.name == "there")
            print(reason)
            self.assertIn(tensor, reason)
            (code, _), _ = refusal(g.admin, "AcceptModel", model="there", reason="wanted")
            self.assertEqual(code, "FAILED_PRECONDITION")  # workers have slots
            for slot in range(2):
                g.workers[slot].terminate()
                self.assertEqual(g.workers[slot].wait(30), 0)
            wait_until(lambda: not any(each.connected
                                       for each in g.admin("GetStatus").workers))
            moectl("model", "accept", "there", "--endpoint", g.address)
            for slot in range(2):
                g.start_worker(slot)
            g.wait_serving(epoch + 1)
            wait_until(lambda: g.state_of("there") == "SERVING")

    def test_a_model_is_unloaded_while_a_worker_is_missing(self):
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            g.kill_worker(1)
            wait_until(lambda: g.state_of(SECOND) != "SERVING")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload)
                g.start_worker(1)
                g.wait_serving(epoch)
                unloading.result(60)
            self.assertEqual([each.name for each in g.models()], [DEFAULT])
            answers_equal_golden(self, g, None, DEFAULT)
            g.load()
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_an_unload_ends_with_the_view(self):
        """A worker stops before it can answer, and is lost: the model stays, and other changes are
        not held back."""
        with Models(2, "--wait-budget-ms", "20000", lease_ms=20000) as g:
            g.load()
            g.load("olmoe")
            freeze(g.workers[1].pid)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload)
                wait_until(lambda: g.state_of(SECOND) == "UNLOADING")
                begun = time.monotonic()
                g.kill_worker(1)
                with self.assertRaises(grpc.RpcError) as caught:
                    unloading.result(60)
                took = time.monotonic() - begun
            print("%.1f s: %s" % (took, caught.exception.details()))
            self.assertLess(took, 20)
            self.assertNotEqual(g.state_of(SECOND), "")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload, "olmoe")  # without a view
                g.start_worker(1)
                unloading.result(60)
            wait_until(lambda: g.state_of(SECOND) == "SERVING")
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_a_load_that_is_cancelled_is_undone(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder, Models(2) as g:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with g.load_begun(big):
                try:
                    g.load()
                    self.assertEqual(g.state_of("big"), "SERVING")  # it was faster than this call
                    g.unload()
                except grpc.RpcError as error:  # one at a time
                    self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE, error.details())
            # It is undone, unless all slots had loaded it before the cancellation came.
            wait_until(lambda: g.state_of("big") in ("", "SERVING"))
            if g.state_of("big") == "SERVING":
                g.unload("big")
            answers_equal_golden(self, g, None, DEFAULT)
            g.load()
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_a_load_that_the_coordinator_forgets_is_undone(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder, Models(2) as g:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with g.load_begun(big):
                g.restart_coordinator()
            wait_until(lambda: admin.GroupState.Name(
                g.admin("GetStatus").state) == "GROUP_STATE_SERVING")
            if g.state_of("big") != "":  # it was faster than the kill
                g.unload("big")

            def again():
                try:
                    return g.load(directory=big)
                except grpc.RpcError:  # workers close what they had
                    return None
            wait_until(again)
            g.unload("big")
            answers_equal_golden(self, g, None, DEFAULT)

    def test_a_worker_dies_during_a_load(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with Models(2, "--wait-budget-ms", "500") as g:
                epoch = g.epoch()
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    loading = pool.submit(g.load, directory=big)
                    wait_until(lambda: loading.done() or g.state_of("big") != "")
                    g.kill_worker(1)
                    g.start_worker(1)
                    g.wait_serving(epoch)
                    try:
                        loading.result(60)
                    except grpc.RpcError as error:
                        print(error.code(), error.details())
                wait_until(lambda: g.state_of("big") in ("SERVING", ""))
                answers_equal_golden(self, g, None, DEFAULT)

    def test_a_training_group_serves_an_added_model(self):
        """Only the default model learns; optimizer steps leave the added one as it is."""
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            with Models(2, "--training", "adamw", "--training-dir", folder) as g:
                g.load()
                answers_equal_golden(self, g, SECOND, SECOND)
                layer, _, x, dy, _ = next(golden_gradients(DEFAULT))
                t = Trainer(g.endpoints[0])
                version = t.state().weights_version
                with Traffic(g, SECOND, SECOND) as traffic:
                    for _ in range(5):
                        t.backward(layer, dy, x, t.forward(layer, x))
                        t.optimizer_step()
                        traffic.wait_for_more(5)
                    self.assertEqual(traffic.failures, [])
                self.assertEqual(t.state().weights_version, version + 5)
                answers_equal_golden(self, g, SECOND, SECOND)
                moectl("training", "save", "k", "--endpoint", g.endpoints[0])
                g.unload()
                routing = t.forward(layer, x)
                t.backward(layer, dy, x, routing)
                t.close()


if __name__ == "__main__":
    main()
