# SPDX-License-Identifier: Apache-2.0
"""moed.transformers: transformers models without experts, which a group has.

The models are real classes of transformers, with the weights of the golden models. Needs torch 2.4
and transformers 5, for example in a virtual environment that sees the system's packages:

    V/bin/python tests/integration/test_transformers_models.py build/release tests/golden/models"""

import contextlib
import copy
import os
import shutil
import tempfile
import threading
import unittest

from group import BACKEND, FAMILIES, MODELS, Group, main, model_directory, relative_error
import moed

try:
    import torch
    import transformers
except ImportError as error:
    missing = str(error)
else:
    import moed.transformers
    missing = ""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

NEW_TOKENS = 12
# Families that routing="client" does not serve, and why.
WITHOUT_CLIENT = {"llama4": "no experts interface", "longcat_flash": "no experts interface",
                  "nemotron_h_latent": "latent space"}
UNCOMMON = os.path.join(os.path.dirname(os.path.abspath(MODELS)), "uncommon")


def class_of(path):
    """The class that has generate(): of Qwen-Omni the thinker, else that which wrote the files."""
    name = transformers.AutoConfig.from_pretrained(path).architectures[0]
    return getattr(transformers, name.replace("OmniMoeFor", "OmniMoeThinkerFor"))


def make_model(family, to, by_token=False):
    """A model of the family that can generate, in fp32. (The golden models were made for their MoE
    blocks alone, so some have attention that transformers cannot run.)

    by_token  of DeepSeek-V4: its first layer routes by token id"""
    source = model_directory(family)
    model_class = class_of(source)
    config = model_class.config_class.from_pretrained(source)
    if family in ("deepseek_v2", "deepseek_v3"):
        config.num_key_value_heads = config.num_attention_heads
    if family == "qwen3_next":
        config.layer_types = ["linear_attention", "full_attention"]
    if by_token:
        config.mlp_layer_types = ["hash_moe"] + config.mlp_layer_types[1:]
    torch.manual_seed(1)
    model = model_class.from_pretrained(source, config=config, dtype=torch.float32)
    if by_token:
        table = model.model.layers[0].mlp.gate.tid2eid
        experts = torch.rand(len(table), config.num_local_experts).argsort(dim=1)
        table.copy_(experts[:, : table.shape[1]])
    model.save_pretrained(to)
    return model.eval()


def local_model(path, **options):
    return class_of(path).from_pretrained(
        path, **{"dtype": torch.float32, **options}).eval()


@contextlib.contextmanager
def group(path, workers=1, *extra):
    g = Group(path, workers, *extra)
    try:
        yield g
    finally:
        g.stop()


@contextlib.contextmanager
def served(family, workers=1, *extra, by_token=False):
    """(path, model, client) of a family's model and of a group that serves it."""
    with tempfile.TemporaryDirectory(prefix="moed-hf-") as path:
        model = make_model(family, path, by_token)
        with group(path, workers, *extra) as g, moed.Client(g.endpoint) as client:
            yield path, model, client


def tokens(batch, length=7, seed=3):
    return torch.randint(3, 48, (batch, length), generator=torch.Generator().manual_seed(seed))


@unittest.skipIf(missing, missing)
class Base(unittest.TestCase):
    def generate(self, model, batch):
        """Greedy tokens after prompts; of a batch, the second prompt is padded on the left."""
        prompt, mask = tokens(batch), torch.ones(batch, 7, dtype=torch.long)
        if batch > 1:
            mask[1, :3] = 0
        return model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS,
                              min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)

    def logits(self, model, **options):
        with torch.no_grad():
            return model(tokens(2, 9, 4), **options)


class Families(Base):
    """One test for each family: all ways to make its experts remote."""

    def ways(self, path, client, interface):
        """(name, model) of each way."""
        yield "load", moed.transformers.load(path, client, dtype=torch.float32)
        yield "patch", moed.transformers.patch(local_model(path), client)
        if interface:
            yield "load, client", moed.transformers.load(path, client, routing="client",
                                                         dtype=torch.float32)
            yield "registry", moed.transformers.patch(
                local_model(path, experts_implementation="moed"), client, routing="client")

    def check(self, family, workers):
        why_not = WITHOUT_CLIENT.get(os.path.basename(family))
        with served(family, workers) as (path, local, client):
            want = self.logits(local)
            texts = {batch: self.generate(local, batch) for batch in (1, 2)}
            experts = sum(p.numel() * p.element_size() for name, p in local.named_parameters()
                          if ".experts." in name)
            count = 0
            for way, model in self.ways(path, client, why_not is None):
                difference = float((self.logits(model).logits - want.logits).abs().max())
                held = model.get_memory_footprint()
                print("%-13s %-12s logits differ by %.1e; %d of %d bytes are local" % (
                    os.path.basename(family), way, difference, held, local.get_memory_footprint()))
                self.assertLessEqual(difference, 1e-5, way)
                for batch, text in texts.items():
                    self.assertTrue(torch.equal(self.generate(model, batch), text), (way, batch))
                self.assertLessEqual(held, local.get_memory_footprint() - experts, way)
                count += 1
            self.assertEqual(count, 4 if why_not is None else 2)
            if why_not is not None:
                for make in (lambda: moed.transformers.load(path, client, routing="client"),
                             lambda: moed.transformers.patch(local, client, routing="client")):
                    with self.assertRaisesRegex(ValueError, why_not):
                        make()
                self.assertTrue(torch.equal(self.logits(local).logits, want.logits))


def add(family, workers):
    setattr(Families, "test_" + os.path.basename(family),
            lambda self: self.check(family, workers))


for number, each_family in enumerate(FAMILIES):
    add(each_family, 1 + number % 2)
for each_family in ("nemotron_h", "nemotron_h_latent", "phimoe"):
    add(os.path.join(UNCOMMON, each_family), 2)


class Models(Base):
    def test_weights_of_experts_are_not_read(self):
        """The frontend's files do not even have them."""
        with served("qwen2_moe") as (path, local, client), \
                tempfile.TemporaryDirectory(prefix="moed-hf-") as small:
            for name in os.listdir(path):
                shutil.copy(os.path.join(path, name), small)
            file = os.path.join(small, "model.safetensors")
            tensors = moed.read_safetensors(file)
            kept = {name: value for name, value in tensors.items() if ".experts." not in name}
            self.assertLess(len(kept), len(tensors))
            moed.write_safetensors(file, kept)
            for routing in ("server", "client"):
                model, report = moed.transformers.load(small, client, routing=routing,
                                                       dtype=torch.float32,
                                                       output_loading_info=True)
                self.assertEqual({key: value for key, value in report.items() if value}, {})
                self.assertTrue(torch.equal(self.generate(model, 2), self.generate(local, 2)))

    def test_bf16_is_no_worse_than_local(self):
        for family in ("mixtral", "gpt_oss", "deepseek_v3"):
            with served(family) as (path, exact, client):
                want = self.logits(exact).logits.double()
                errors = {}
                for name, model in (
                        ("local", local_model(path, dtype=torch.bfloat16)),
                        ("load", moed.transformers.load(path, client, dtype=torch.bfloat16)),
                        ("registry", moed.transformers.load(path, client, routing="client",
                                                            dtype=torch.bfloat16))):
                    errors[name] = relative_error(self.logits(model).logits.double().numpy(),
                                                  want.numpy())
                print(family, " ".join("%s %.2e" % each for each in errors.items()))
                for name in ("load", "registry"):
                    self.assertLessEqual(errors[name], 1.1 * errors["local"], (family, name))

    def test_router_logits(self):
        for family in ("mixtral", "minimax_m2", "qwen2_moe"):
            with served(family) as (path, local, client):
                want = self.logits(local, output_router_logits=True)
                for routing in ("server", "client"):
                    model = moed.transformers.load(path, client, routing=routing,
                                                   dtype=torch.float32)
                    got = self.logits(model, output_router_logits=True)
                    self.assertEqual(len(got.router_logits), len(want.router_logits))
                    for mine, theirs in zip(got.router_logits, want.router_logits):
                        self.assertLessEqual(float((mine - theirs).abs().max()), 1e-5)
                    self.assertIsNone(self.logits(model).router_logits)

    def test_a_model_without_experts_is_not_saved(self):
        with served("olmoe") as (path, local, client), tempfile.TemporaryDirectory() as to:
            for model in (moed.transformers.load(path, client),
                          moed.transformers.load(path, client, routing="client"),
                          moed.transformers.patch(local, client)):
                for save in (model.save_pretrained, model.push_to_hub):
                    with self.assertRaisesRegex(ValueError, "without its experts"):
                        save(to)
                with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
                    copy.deepcopy(model)
                with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
                    torch.save(model, os.path.join(to, "model"))
                torch.save(model.state_dict(), os.path.join(to, "rest"))
                self.assertFalse(any(".experts." in name for name in model.state_dict()))
            self.assertEqual(sorted(os.listdir(to)), ["model", "rest"])

    def test_several_threads_share_a_model(self):
        with served("qwen3_moe", 2) as (path, local, client):
            want = [local.generate(tokens(1, 5, seed), max_new_tokens=NEW_TOKENS, do_sample=False,
                                   pad_token_id=0) for seed in range(6)]
            for routing in ("server", "client"):
                model = moed.transformers.load(path, client, routing=routing, dtype=torch.float32)
                got = [None] * len(want)

                def run(seed):
                    got[seed] = model.generate(tokens(1, 5, seed), max_new_tokens=NEW_TOKENS,
                                               do_sample=False, pad_token_id=0)

                threads = [threading.Thread(target=run, args=(i,)) for i in range(len(want))]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                for mine, theirs in zip(got, want):
                    self.assertTrue(torch.equal(mine, theirs), routing)

    def test_compiled_models(self):
        """A layer is one operator: no graph breaks."""
        for family in ("mixtral", "gpt_oss"):
            with served(family) as (path, local, client):
                want = self.logits(local).logits
                for routing in ("server", "client"):
                    torch._dynamo.reset()
                    model = moed.transformers.load(path, client, routing=routing,
                                                   dtype=torch.float32)
                    model.forward = torch.compile(model.forward, backend="aot_eager",
                                                  fullgraph=True)
                    got = self.logits(model, use_cache=False).logits
                    self.assertLessEqual(float((got - want).abs().max()), 1e-5, routing)


class TokenIds(Base):
    """DeepSeek-V4 with a layer that routes by token id: the model's input_ids go to the group."""

    def test_both_ways_and_compiled(self):
        with served("deepseek_v4", 2, by_token=True) as (path, local, client):
            self.assertEqual([each.vocabulary for each in client.layers],
                             [local.config.vocab_size, 0])
            want = self.logits(local, output_router_logits=True)
            texts = {batch: self.generate(local, batch) for batch in (1, 2)}
            for routing in ("server", "client"):
                torch._dynamo.reset()
                model = moed.transformers.load(path, client, routing=routing, dtype=torch.float32)
                got = self.logits(model, output_router_logits=True)
                for mine, theirs in zip((got.logits, *got.router_logits),
                                        (want.logits, *want.router_logits)):
                    self.assertLessEqual(float((mine - theirs).abs().max()), 1e-5, routing)
                for batch, text in texts.items():
                    self.assertTrue(torch.equal(self.generate(model, batch), text), routing)
                model.forward = torch.compile(model.forward, backend="aot_eager")
                compiled = self.logits(model, use_cache=False).logits
                self.assertLessEqual(float((compiled - want.logits).abs().max()), 1e-5, routing)

    def test_without_input_ids_there_is_no_routing(self):
        with served("deepseek_v4", by_token=True) as (path, local, client):
            model = moed.transformers.load(path, client, dtype=torch.float32)
            rows = local.get_input_embeddings()(tokens(1))
            with torch.no_grad(), self.assertRaisesRegex(moed.MoeError, "routes by token id"):
                model(inputs_embeds=rows)

    def test_a_remote_layer_alone(self):
        """RemoteMoE in parts, and what it refuses."""
        with served("deepseek_v4", by_token=True) as (path, local, client):
            block = local.model.layers[0].mlp
            remote = moed.torch.RemoteMoE(0, client)
            ids = tokens(3, 5)
            x = torch.randn(3, 5, remote.layer.hidden)
            with torch.no_grad():
                want, got = block(x, ids), remote(x, ids)
            self.assertLessEqual(float((got - want).abs().max()), 1e-5)
            for error, bad in ((ValueError, ids[:2]), (TypeError, ids.float()),
                               (moed.MoeError, ids + local.config.vocab_size)):
                with torch.no_grad(), self.assertRaises(error):
                    remote(x, bad)

    def test_gradients_of_both_kinds_of_passes(self):
        with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
            settings.write("training = sgd\n")
            settings.flush()
            extra = ("--worker-config", settings.name)
            with served("deepseek_v4", 1, *extra, by_token=True) as (path, local, client):
                ids, x = tokens(2, 6), torch.randn(2, 6, client.layers[0].hidden)
                for retain in (False, True):
                    gradients = []
                    for layer in (local.model.layers[0].mlp,
                                  moed.torch.RemoteMoE(0, client, retain=retain)):
                        rows = x.clone().requires_grad_()
                        layer(rows, ids).square().sum().backward()
                        gradients.append(rows.grad)
                    self.assertLessEqual(
                        relative_error(gradients[1].numpy(), gradients[0].numpy()), 1e-4)


class Training(Base):
    def gradients(self, model):
        """Of the embedding and of attention, by name."""
        model.zero_grad(set_to_none=True)
        ids = tokens(2, 9, 5)
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()
                if p.grad is not None and ("embed" in name or "self_attn" in name)}

    def test_gradients_reach_the_local_layers(self):
        """With gradient checkpointing too; the experts' own stay in the group."""
        with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
            settings.write("training = sgd\n")
            settings.flush()
            for family in ("mixtral", "qwen2_moe", "llama4"):
                with served(family, 1, "--worker-config", settings.name) as (path, local, client):
                    want = self.gradients(local)
                    self.assertGreater(len(want), 4)
                    model = moed.transformers.load(path, client, dtype=torch.float32)
                    for checkpointing in (None, False, True):  # use_reentrant
                        if checkpointing is not None:
                            model.train()
                            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
                            model.enable_input_require_grads()
                        got = self.gradients(model)
                        self.assertEqual(sorted(got), sorted(want))
                        worst = max(relative_error(got[name].numpy(), want[name].numpy())
                                    for name in want)
                        print("%s, checkpointing %s: gradients differ by %.1e" % (
                            family, checkpointing, worst))
                        self.assertLessEqual(worst, 1e-4)
                    remote = moed.torch.RemoteOptimizer(moed.transformers.layers(model), lr=1e-2)
                    before = self.logits(model.eval()).logits
                    remote.step()
                    self.assertFalse(torch.equal(self.logits(model).logits, before))

    def test_what_cannot_train_refuses_the_backward_pass(self):
        with served("mixtral") as (path, _, client):
            for routing in ("server", "client"):
                model = moed.transformers.load(path, client, routing=routing, dtype=torch.float32)
                ids = tokens(1)
                loss = model(ids, labels=ids).loss
                with self.assertRaisesRegex(RuntimeError, "the group does not train"):
                    loss.backward()


class Refused(Base):
    def refused(self, pattern, make, *models, kind=ValueError):
        """Each with one clear error, and models that stay as they are."""
        before = [self.logits(model).logits for model in models]
        with self.assertRaisesRegex(kind, pattern) as caught:
            make()
        print("  %s: %s" % (kind.__name__, caught.exception))
        for model, logits in zip(models, before):
            self.assertTrue(torch.equal(self.logits(model).logits, logits))

    def test_another_model_than_the_groups(self):
        load, patch = moed.transformers.load, moed.transformers.patch
        with served("mixtral") as (path, local, client):
            good = client.info.model_digest
            bad = good[:-1] + ("0" if good[-1] != "0" else "1")
            for routing in ("server", "client"):
                self.refused("MODEL_MISMATCH.*" + good, lambda: patch(
                    local, client, routing=routing, model_digest=bad), local, kind=moed.MoeError)
                self.refused("MODEL_MISMATCH", lambda: load(
                    path, client, routing=routing, model_digest=bad), kind=moed.MoeError)
            load(path, client, model_digest=good)
            self.refused("model_digest has 64 digits", lambda: patch(
                local, client, model_digest="abc"), local)

            def variant(**changes):
                config = copy.deepcopy(local.config)
                for name, value in changes.items():
                    setattr(config, name, value)
                return transformers.AutoModelForCausalLM.from_config(config).eval()

            for pattern, changes in (
                    ("3 MoE layers .0, 1, 2., and the group 2 .0, 1", {"num_hidden_layers": 3}),
                    ("1 MoE layers .0., and the group 2 .0, 1", {"num_hidden_layers": 1}),
                    ("hidden size is 32 in the model, and 64 in the group", {"hidden_size": 32}),
                    ("experts is 4 in the model, and", {"num_local_experts": 4}),
                    ("experts per token is 1 in the model", {"num_experts_per_tok": 1}),
                    ("inner width is 24 in the model", {"intermediate_size": 24})):
                other = variant(**changes)
                for routing in ("server", "client"):
                    self.refused(pattern, lambda: patch(other, client, routing=routing), other)
                self.refused(pattern, lambda: load(path, client, config=other.config))
            self.refused("family is olmoe, and the group's mixtral", lambda: load(
                model_directory("olmoe"), client))
            half = local_model(path, dtype=torch.float16)
            self.refused("dtype is torch.float16", lambda: patch(half, client))

    def test_wrong_uses(self):
        patch = moed.transformers.patch
        with served("mixtral") as (path, local, client):
            self.refused("routing is 'server' or 'client'", lambda: patch(
                local, client, routing="both"), local)
            unknown = transformers.FlexOlmoForCausalLM(transformers.FlexOlmoConfig(
                hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=48, num_experts=4, num_experts_per_tok=2,
                pad_token_id=0))
            self.refused("of family flex_olmo is no MoE block that moed.transformers knows",
                         lambda: patch(unknown, client))
            dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=48))
            self.refused("family llama: this model has no MoE block", lambda: patch(dense, client),
                         dense)
            alone = local_model(path, experts_implementation="moed")
            self.refused("call moed.transformers.patch", lambda: self.logits(alone),
                         kind=RuntimeError)
            for bad in (client.info.workers[0], moed.AsyncClient(client.info.workers[0])):
                self.refused("client is a moed.Client, not", lambda: patch(local, bad), local,
                             kind=TypeError)
                self.refused("client is a moed.Client, not",
                             lambda: moed.transformers.load(path, bad), kind=TypeError)
            self.refused("model is a model of transformers, not a Linear",
                         lambda: patch(torch.nn.Linear(2, 2), client), kind=TypeError)
            self.refused("model_class is a class of models, .* not AutoModel",
                         lambda: moed.transformers.load(path, client,
                                                        model_class=transformers.AutoModel),
                         kind=TypeError)
            patch(local, client)
            for routing in ("server", "client"):
                self.refused("remote already", lambda: patch(local, client, routing=routing), local)


del Base  # its subclasses have the tests

if __name__ == "__main__":
    main()
