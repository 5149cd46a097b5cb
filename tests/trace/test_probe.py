"""The probing forward: from inputs, from a pipeline, and with what it must survive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.arch import BlockDeclaration
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import ModelError
from samovar.hooks import HookRegistry, ModelHook
from samovar.trace import probe_anatomy, probe_pipeline


def case(name: str) -> zoo.Case:
    return next(case for case in zoo.load() if case.id == name)


def test_without_later_inputs_streams_have_no_kind() -> None:
    flux = case("FluxTransformer2DModel")
    anatomy = probe_anatomy(flux.build(), flux.inputs(0))
    assert all(stream.kind is None and stream.parameter for stack in anatomy.stacks for stream in stack.streams)
    assert anatomy.leader == "transformer_blocks"


def test_a_pipeline_is_probed_by_two_steps_of_its_own() -> None:
    pipe = tiny_flux_pipeline()
    anatomy = probe_pipeline(pipe, pipe.transformer, height=16, width=16)
    kinds = {stack.path: [stream.kind for stream in stack.streams] for stack in anatomy.stacks}
    assert kinds == {"transformer_blocks": ["text", "image"], "single_transformer_blocks": ["text", "image"]}
    assert not pipe.transformer._forward_pre_hooks


def test_a_pipeline_that_does_not_call_the_denoiser_is_refused() -> None:
    def pipeline(**settings: Any) -> None:
        return None

    with pytest.raises(ModelError, match="called its Linear 0 times in two steps"):
        probe_pipeline(pipeline, torch.nn.Linear(2, 2))


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    with pytest.raises(RuntimeError):
        probe_anatomy(model, flux.inputs(0) | {"hidden_states": torch.zeros(1, 20, 99)})
    later = flux.inputs(1)
    broken = model.single_transformer_blocks[0]
    own_forward = broken.forward
    broken.forward = None  # What a library left in its place, to be kept as it is.
    with pytest.raises(TypeError):
        probe_anatomy(model, flux.inputs(0), later)
    assert vars(broken)["forward"] is None
    broken.forward = own_forward
    assert len(probe_anatomy(model, flux.inputs(0), later).stacks) == 2


def test_a_hooked_model_is_probed_like_a_bare_one() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    plain = probe_anatomy(model, flux.inputs(0), flux.inputs(1))
    for module in (model, *model.transformer_blocks):
        HookRegistry.get_or_create(module).register_hook("nothing", ModelHook())
    assert probe_anatomy(model, flux.inputs(0), flux.inputs(1)) == plain


def test_a_stack_that_does_not_run_is_named() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    model.spare_blocks = copy.deepcopy(model.transformer_blocks)
    anatomy = probe_anatomy(model, flux.inputs(0))
    assert anatomy.idle == ("spare_blocks",)
    assert "spare_blocks" not in [stack.path for stack in anatomy.stacks]


def test_a_declared_leader_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZImageTransformer2DModel", "Lumina2Transformer2DModel"):
        model = case(name)
        monkeypatch.setitem(DECLARATIONS, name, BlockDeclaration(leader="layers"))
        assert probe_anatomy(model.build(), model.inputs(0), model.inputs(1)).leader == "layers"


class Pair(NamedTuple):
    image: torch.Tensor
    text: torch.Tensor


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, context: torch.Tensor) -> Any:
        return hidden + self.attn(hidden), context + self.attn(context)


class Named(Plain):
    def forward(self, hidden: torch.Tensor, context: torch.Tensor) -> Any:
        return Pair(*super().forward(hidden, context))


class Other(Plain):
    """The same under other names, in another order."""

    def forward(self, scale: float, x: torch.Tensor, y: torch.Tensor, **others: Any) -> Any:
        return super().forward(x * scale, y)


class Open(Plain):
    def forward(self, hidden: torch.Tensor, **others: Any) -> Any:
        return super().forward(hidden, others["context"])


class Short(Plain):
    def forward(self, hidden: torch.Tensor, context: torch.Tensor) -> Any:
        return (super().forward(hidden, context)[0],)


Call = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Model(torch.nn.Module):
    """Blocks that a test composes, in a model that runs them one after the other."""

    def __init__(self, *blocks: torch.nn.Module, call: Call = lambda block, x, y: block(x, y)) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.call = call

    def forward(self, sample: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            output = self.call(block, sample, text)
            sample, text = output if len(output) == 2 else (output[0], text)
        return sample


def steps() -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 2, 4, generator=generator)
    first, second = ({"sample": torch.randn(1, 3, 4, generator=generator), "text": text} for _ in range(2))
    return first, second


def streams(model: torch.nn.Module) -> list[tuple[str | None, str | None]]:
    (stack,) = probe_anatomy(model, *steps()).stacks
    return [(stream.parameter, stream.kind) for stream in stack.streams]


CARRIED = [("hidden", "image"), ("context", "text")]


def test_blocks_that_run_twice_are_probed_once_each() -> None:
    one, two = Plain(), Plain()
    for blocks in ([one, two, one, two], [one, one, one]):
        model = Model(*blocks)
        assert streams(model) == CARRIED
        assert len(probe_anatomy(model, *steps()).stacks[0]) == len(blocks)
        assert all("forward" not in vars(block) and not block._forward_hooks for block in blocks)


def test_compiled_models_and_blocks_are_probed_like_bare_ones() -> None:
    blocks = [Plain(), Plain(), Plain()]
    bare = probe_anatomy(Model(*blocks), *steps())
    for model in (Model(*map(torch.compile, blocks)), torch.compile(Model(*blocks))):
        before = [(type(module), set(vars(module))) for module in model.modules()]
        assert probe_anatomy(model, *steps()) == bare
        assert [(type(module), set(vars(module))) for module in model.modules()] == before


def test_blocks_may_name_their_parameters_each_in_its_own_way() -> None:
    def call(block: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return block(2.0, x, y=y, spare=torch.zeros(9)) if isinstance(block, Other) else block(x, context=y)

    assert streams(Model(Plain(), Other(), Plain(), Other(), call=call)) == CARRIED
    assert streams(Model(Open(), Open(), call=call)) == CARRIED, "what only **kwargs takes, too"


def test_named_tuples_are_read_and_rebuilt() -> None:
    assert streams(Model(Named(), Named())) == CARRIED


def test_blocks_that_return_different_numbers_of_values_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'blocks' return different .* \(2 by 'blocks.1', 1 by 'blocks.3'\)"):
        probe_anatomy(Model(Plain(), Plain(), Short(), Short()), *steps())


def test_a_model_of_which_no_block_runs_is_refused() -> None:
    def skip(block: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, y

    with pytest.raises(ModelError, match=r"No block of Model ran, in 'blocks'; .* before attaching hooks that skip"):
        probe_anatomy(Model(Plain(), Plain(), call=skip), *steps())


def test_a_declared_leader_that_does_not_run_leads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECLARATIONS, "Model", BlockDeclaration(stacks=("blocks", "spare"), leader="spare"))
    model = Model(Plain(), Plain())
    model.spare = torch.nn.ModuleList([Plain(), Plain()])
    assert probe_anatomy(model, *steps()).leader == "blocks"


def test_a_pipeline_that_cannot_be_called_so_is_named() -> None:
    class Unprompted:
        def __call__(self, class_labels: Any) -> None: ...

    with pytest.raises(ModelError, match=r"Unprompted could not be run .*'prompt'.*probe its Linear .* probe_anatomy"):
        probe_pipeline(Unprompted(), torch.nn.Linear(2, 2))


def test_a_pipeline_with_a_compiled_denoiser_is_probed() -> None:
    pipe = tiny_flux_pipeline()
    bare = probe_pipeline(pipe, pipe.transformer, height=16, width=16)
    pipe.transformer = torch.compile(pipe.transformer)
    assert probe_pipeline(pipe, pipe.transformer, height=16, width=16) == bare


# ------------------------------------------------------------------------------------------------ kinds


class Mixing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.attn(torch.cat([x, y], dim=1)).mean(1, keepdim=True)  # Everything depends on everything.
        return x + both, y + both


class Composed(torch.nn.Module):
    """Streams that a test composes from the sample (s), the conditioning (c) and learned padding (p)."""

    def __init__(self, x: str, y: str) -> None:
        super().__init__()
        self.parts = (x, y)
        self.blocks = torch.nn.ModuleList(Mixing() for _ in range(2))
        self.padding = torch.nn.Parameter(torch.randn(1, 2, 4))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        source = {"s": first, "c": second, "p": self.padding, "+": first + second}
        x, y = (torch.cat([source[part] for part in parts], dim=1) for parts in self.parts)
        for block in self.blocks:
            x, y = block(x, y)
        return x


def composed_inputs(step: int) -> dict[str, Any]:
    torch.manual_seed(0)
    second = torch.randn(1, 3, 4)
    torch.manual_seed(step + 1)
    return {"first": torch.randn(1, 3, 4), "second": second}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [("s", "image"), ("c", "text"), ("sc", "joint"), ("cs", "joint"), ("sp", "image"), ("p", "text"), ("+", "image"),
     ("+c", "joint"), ("cp", "text")],
)  # fmt: skip
def test_kind_of_a_composed_stream(parts: str, kind: str) -> None:
    anatomy = probe_anatomy(Composed(parts, "s"), composed_inputs(0), composed_inputs(1))
    assert [stream.kind for stream in anatomy.stacks[0].streams] == [kind, "image"]


def test_steps_that_do_not_differ_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the same values in 'first', 'second'. .* two different denoising steps"):
        probe_anatomy(Composed("s", "c"), composed_inputs(0), composed_inputs(0))


class Lister(Mixing):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return *super().forward(x, y), [x, None]


def test_values_of_any_form_beside_the_streams() -> None:
    class Listing(Composed):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            x, y = first, second
            for block in self.blocks:
                x, y, (extra, nothing) = block(x, y)
                assert extra.shape == x.shape
                assert nothing is None
            return x

    model = Listing("s", "c")
    model.blocks = torch.nn.ModuleList([Lister(), Lister()])
    anatomy = probe_anatomy(model, composed_inputs(0), composed_inputs(1))
    assert [stream.kind for stream in anatomy.stacks[0].streams] == ["image", "text", None]
