"""What is special to a mixture of experts: the choice, the exported graphs, and what they leave."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from export_models import session
from loops import moe as loops
from torch import Tensor

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

HIDDEN = 20
SIGMOID = {"router": "sigmoid"}


def build(case: str, **changes: Any) -> Any:
    """A mixer whose bias, if any, changes the choice."""
    torch.manual_seed(3)
    mixer = mixers.build({**loops.CASES[case], **changes}, HIDDEN, 0, 1e-6, where="m")
    if mixer.config.expert_bias:
        mixer.expert_bias.copy_(torch.linspace(-0.4, 0.6, mixer.config.num_experts))
    return mixer.requires_grad_(False)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(mixer: Any, x: Tensor) -> Tensor:
    y: Tensor = mixer(x, {}, torch.zeros(len(x), dtype=torch.int64))[0]
    return y


def test_a_bias_counts_in_the_choice_and_not_in_the_weights() -> None:
    mixer, x = build("moe, sigmoid, bias").double(), numbers(2, 40, HIDDEN)
    wanted, _ = loops.loop(mixer, x.numpy(), {}, np.zeros(2))
    np.testing.assert_allclose(run(mixer, x), wanted, rtol=0, atol=1e-9)
    mixer.expert_bias.zero_()
    assert (run(mixer, x) - torch.from_numpy(wanted)).abs().max() > 0.1


def test_a_softmax_over_the_chosen_is_the_normalised_one_over_all() -> None:
    mixer, x = build("moe").double(), numbers(2, 40, HIDDEN)
    logits = x @ mixer.router.weight.T
    weights, chosen = mixer._route(logits)
    over_all = logits.softmax(-1).gather(-1, chosen)
    torch.testing.assert_close(weights, over_all / over_all.sum(-1, keepdim=True))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    mixer, x = build("moe, groups").double(), numbers(2, 40, HIDDEN)
    mixer.expert_bias /= 10
    wanted, _ = loops.loop(mixer, x.numpy(), {}, np.zeros(2))
    np.testing.assert_allclose(run(mixer, x), wanted, rtol=0, atol=1e-9)
    _, chosen = mixer._route(x @ mixer.router.weight.T)
    object.__setattr__(mixer.config, "num_groups", 1)
    _, free = mixer._route(x @ mixer.router.weight.T)
    changed = (chosen.sort(-1).values != free.sort(-1).values).any(-1)
    assert changed.any() and not changed.all()


@pytest.mark.parametrize("case", ["moe, relu2", "moe, shared"])
def test_biases_are_of_the_shared_mlp_and_of_the_latent_width(case: str) -> None:
    mixer, x = build(case, bias=True).double(), numbers(2, 9, HIDDEN)
    wanted, _ = loops.loop(mixer, x.numpy(), {}, np.zeros(2))
    np.testing.assert_allclose(run(mixer, x), wanted, rtol=0, atol=1e-9)
    biased = {name for name, _ in mixer.named_parameters() if name.endswith("bias")}
    latent = {"in_proj.bias", "out_proj.bias"} if mixer.config.latent_size else set()
    up = "gate_up" if mixer.config.gated else "up"
    assert biased == {f"shared.{up}_proj.bias", "shared.down_proj.bias"} | latent


def poisoned(mixer: Any, x: Tensor) -> list[int]:
    """Experts that no token chooses, their weights NaN: one that is computed would be seen."""
    _, chosen = mixer._route(x @ mixer.router.weight.T)
    idle = sorted(set(range(mixer.config.num_experts)) - set(chosen.flatten().tolist()))
    for expert in idle:
        mixer.experts.inwards[expert] = torch.nan
        mixer.experts.down_proj[expert] = torch.nan
    return idle


def test_experts_that_no_token_chose_are_not_computed() -> None:
    mixer, x = build("moe"), numbers(1, 1, HIDDEN).float()
    wanted = run(mixer, x)
    assert len(poisoned(mixer, x)) == 3
    torch.testing.assert_close(run(mixer, x), wanted, rtol=0, atol=0)


def model(case: str) -> SequenceModel:
    """A layer with a state, followed by experts that see what the tokens are."""
    torch.manual_seed(5)
    conv = {"type": "short_conv", "conv_size": 2}
    config = ModelConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=0,
        layers=("conv",),
        mlps=("moe",),
        mixers={"conv": conv, "moe": loops.CASES[case]},
    )
    made = SequenceModel(config).eval().requires_grad_(False)
    made.blocks[0].mlp = build(case)
    made.embedding.weight.normal_()
    return made


def lowered(traced: Any, profile: str) -> Any:
    graph = traced.clone()
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    return graph


class _Loop(torch.nn.Module):
    """The loop in the place of the experts."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.state_specs = inner, inner.state_specs

    def forward(self, x: Tensor, state: Any, position: Tensor) -> Any:
        """Run the loop."""
        return torch.from_numpy(loops.loop(self.inner, x.numpy(), {}, position.numpy())[0]), {}


@pytest.mark.parametrize(
    "case",
    ["moe", "moe, one", "moe, sigmoid, bias", "moe, gated shared", "moe, relu2", "moe, groups"],
)
def test_exported_graphs_are_the_loop(case: str) -> None:
    made = model(case)
    ids = torch.randint(0, 50, (2, 72), generator=torch.Generator().manual_seed(4))
    traced = trace(made)
    graphs = {profile: lowered(traced, profile) for profile in ("fused", "plain", "onnx")}
    exact = copy.deepcopy(made).double()  # the trace shares its weights with the model
    exact.blocks[0].mlp = _Loop(exact.blocks[0].mlp)
    wanted, _ = exact(ids)
    specs = made.state_specs()
    for profile, graph in graphs.items():
        types = [node.op_type for node in graph.graph]
        fused = profile == "fused" and made.blocks[0].mlp.config.gated
        assert types.count("MoE") == fused
        assert types.count("Unique") == (not fused)
        runner, logits = session(graph), []
        now = {
            s.name: t.numpy().astype("f")
            for s, t in zip(specs, made.initial_state(2).values(), strict=True)
        }
        for piece in ids.split([1, 7, 63, 1], dim=1):
            feeds = {s.input_name: now[s.name] for s in specs}
            feeds |= {"input_ids": piece.numpy(), "num_logits_to_keep": np.array(0)}
            part, *after = runner.run(None, feeds)
            logits.append(part)
            now = {spec.name: array for spec, array in zip(specs, after, strict=True)}
        got = np.concatenate(logits, 1)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("case", ["moe, sigmoid, bias", "moe, relu2"])
def test_a_step_of_a_graph_leaves_the_experts_alone_that_it_did_not_choose(case: str) -> None:
    made, profiles = model(case), ("fused", "plain")
    states = {s.input_name: np.zeros((1, *s.shape), "f") for s in made.state_specs()}
    feeds = {"input_ids": np.array([[7]]), "num_logits_to_keep": np.array(0), **states}
    traced, seen = trace(made), []
    wanted = [session(lowered(traced, profile)).run(None, feeds)[0] for profile in profiles]
    made.blocks[0].mlp_norm.register_forward_hook(lambda *call: seen.append(call[-1]))
    made(torch.tensor([[7]]))
    assert len(poisoned(made.blocks[0].mlp, seen[0])) == 3  # in the trace too, which shares them
    got = [session(lowered(traced, profile)).run(None, feeds)[0] for profile in profiles]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_experts": 0}, "num_experts is 0; give at least 1"),
        ({"experts_per_token": 6}, "experts_per_token is 6; there are only num_experts = 5"),
        ({"intermediate_size": 0}, "intermediate_size is 0; give at least 1"),
        ({"shared_size": -1}, "shared_size is -1; give at least 0"),
        ({"router": "topk"}, "router is 'topk'; allowed: softmax, sigmoid"),
        ({"expert_bias": True}, "expert_bias belongs to the router sigmoid"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        ({"sum_eps": 0.0}, "sum_eps is 0.0; it must be above 0 and below 1"),
        ({"num_groups": 2}, "num_groups belongs to the router sigmoid"),
        ({"num_groups": 2, **SIGMOID}, "num_groups is 2; give a divisor of num_experts = 5"),
        ({"num_groups": 5, **SIGMOID}, "that leaves at least 2 in a group"),
        ({"num_groups": 2, "num_experts": 6, **SIGMOID, "groups_per_token": 3}, "give 1 .* to .*2"),
        (
            {"num_groups": 3, "num_experts": 6, **SIGMOID, "experts_per_token": 3},
            r"groups_per_token is 1; give 2 \(enough for experts_per_token\)",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**loops.CASES["moe"], **change}, HIDDEN, 0, 1e-6, where="m")
