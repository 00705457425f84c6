"""The GPT: GPT-2's numbers, apart from its neighbours, at every size and switch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from paceline.lm.gpt import GPT, GPTShape, shape_of, to_transformers

pytestmark = pytest.mark.slow

SHAPE = GPTShape(vocabulary=61, length=12, width=32, layers=3, heads=4)


def make(shape=SHAPE, seed=0, **switches):
    torch.manual_seed(seed)
    model = GPT(shape, **switches)
    with torch.no_grad():  # attention that prefers some tokens, biases and norms that do something
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(8)
    return model


def some_tokens(rows=2, length=12, vocabulary=61, seed=1):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


# --- GPT-2 ----------------------------------------------------------------------------------------


def test_gpt2_has_its_published_size():
    with torch.device("meta"):
        model = GPT(shape_of("gpt2", 50257, 1024))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 == model.shape.parameters


@pytest.mark.parametrize(
    "name", ["gpt:0.3m", "gpt:1m", "gpt:3m", "gpt:7m", "gpt:12m", "gpt:25m", "gpt:50m", "gpt:88m"]
)
def test_a_name_says_how_many_parameters(name):
    shape = shape_of(name, 4096, 256)
    with torch.device("meta"):
        model = GPT(shape)
    count = sum(p.numel() for p in model.parameters())
    assert count == shape.parameters
    assert count == pytest.approx(1e6 * float(name[4:-1]), rel=0.2)


@pytest.mark.parametrize("multiple", [1, 64])
def test_logits_are_those_of_transformers(multiple):
    ours = make(replace(SHAPE, vocabulary_multiple=multiple))
    theirs = to_transformers(ours)
    tokens = some_tokens()
    expected = theirs(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(tokens)[..., : SHAPE.vocabulary], expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_transformers():
    ours = make()
    theirs = to_transformers(ours)
    tokens = some_tokens()
    for logits in (ours(tokens), theirs(tokens).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    weights = dict(theirs.named_parameters())
    torch.testing.assert_close(ours.tokens.weight.grad, weights["transformer.wte.weight"].grad)
    theirs_in = weights["transformer.h.1.attn.c_attn.weight"].grad
    torch.testing.assert_close(ours.blocks[1].attention_in.weight.grad, theirs_in.T)


def test_exporting_draws_no_random_number():
    model = make()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    to_transformers(model)
    assert torch.equal(torch.rand(1), expected)


# --- Initialisation -------------------------------------------------------------------------------


def test_initial_weights_are_gpt2s():
    torch.manual_seed(0)
    model = GPT(GPTShape(vocabulary=1000, length=64, width=128, layers=8, heads=4))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.03), name
            assert parameter.mean().item() == pytest.approx(0, abs=1e-3)


def test_a_seed_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in GPT(SHAPE).parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


# --- Rows too many --------------------------------------------------------------------------------


def test_a_padded_vocabulary_changes_nothing():
    """Same seed, same logits, same gradients; the rows too many stay zero without a gradient."""
    torch.manual_seed(0)
    plain = GPT(SHAPE)
    torch.manual_seed(0)
    padded = GPT(GPTShape(vocabulary=61, length=12, width=32, layers=3, heads=4, vocabulary_multiple=64))
    tokens = some_tokens()
    assert padded.tokens.weight.shape == (64, 32) and not padded.tokens.weight[61:].any()
    assert padded.shape.parameters == sum(p.numel() for p in padded.parameters())
    logits = padded(tokens)
    assert logits.shape == (2, 12, 64) and (logits[..., 61:] == -torch.inf).all()
    torch.testing.assert_close(logits[..., :61], plain(tokens), atol=1e-6, rtol=1e-6)
    assert padded.state_dict().keys() == plain.state_dict().keys()
    logits.logsumexp(-1).sum().backward()
    plain(tokens).logsumexp(-1).sum().backward()
    assert not padded.tokens.weight.grad[61:].any()
    torch.testing.assert_close(padded.tokens.weight.grad[:61], plain.tokens.weight.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(to_transformers(padded)(tokens).logits, plain(tokens), atol=1e-6, rtol=1e-6)


# --- Packed examples ------------------------------------------------------------------------------


def test_packed_examples_are_as_alone():
    model = make().eval()
    tokens = some_tokens(rows=1)
    packed = model(tokens, positions_of(5, 1, 6))
    for start, end in ((0, 5), (5, 6), (6, 12)):
        torch.testing.assert_close(packed[:, start:end], model(tokens[:, start:end]), atol=1e-5, rtol=1e-5)


def test_no_example_influences_another():
    """Changing any one token moves logits of its own example, from there on, and no others."""
    model = make().eval()
    tokens, positions = some_tokens(rows=1), positions_of(5, 1, 6)
    example = torch.tensor([0] * 5 + [1] + [2] * 6)
    before = model(tokens, positions)
    for place in range(12):
        other = tokens.clone()
        other[0, place] = (other[0, place] + 1) % 61
        moved = (model(other, positions) - before).abs().amax(-1)[0] > 0
        expected = (example == example[place]) & (torch.arange(12) >= place)
        assert torch.equal(moved, expected)


def test_rows_have_examples_of_their_own():
    model = make().eval()
    tokens = some_tokens(rows=2)
    positions = torch.cat([positions_of(4, 8), positions_of(12)])
    both = model(tokens, positions)
    torch.testing.assert_close(both[1:], model(tokens[1:]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both[:1, 4:], model(tokens[:1, 4:]), atol=1e-5, rtol=1e-5)


def test_positions_that_count_are_no_positions():
    model = make()
    tokens = some_tokens(rows=1)
    torch.testing.assert_close(model(tokens, positions_of(12)), model(tokens), atol=1e-5, rtol=1e-5)


# --- Switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_activation_checkpointing_changes_no_gradient(packed):
    positions = torch.cat([positions_of(4, 8), positions_of(12)]) if packed else None

    def gradients(model):
        model.train()(some_tokens(), positions).logsumexp(-1).sum().backward()
        return [p.grad for p in model.parameters()]

    plain, again = make(), make(activation_checkpointing=True)
    for a, b in zip(gradients(plain), gradients(again), strict=True):
        assert torch.equal(a, b)


def test_activation_checkpointing_keeps_less():
    def kept(model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model.train()(some_tokens())
        return sum(sizes)

    assert kept(make(activation_checkpointing=True)) < 0.5 * kept(make())


def test_dropout_is_for_training_only():
    model = make(GPTShape(vocabulary=61, length=12, width=32, layers=2, heads=4, dropout=0.5))
    tokens = some_tokens()
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_without_breaks(packed):
    model = make().eval()
    tokens, positions = some_tokens(rows=1), positions_of(5, 7) if packed else None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, positions), model(tokens, positions), atol=1e-5, rtol=1e-4)


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocabulary": 0}, "Invalid vocabulary: 0; allowed: an integer >= 1"),
        ({"layers": 2.0}, "Invalid layers: 2.0"),
        ({"heads": 5}, "Invalid heads: 5; allowed: divisors of the width 32"),
        ({"dropout": 1.0}, "Invalid dropout: 1.0"),
    ],
)
def test_a_shape_that_cannot_be(changed, message):
    fields = {"vocabulary": 61, "length": 12, "width": 32, "layers": 3, "heads": 4}
    with pytest.raises(ValueError, match=message):
        GPTShape(**fields | changed)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model 'gpt:13m'; did you mean gpt:12m\?"):
        shape_of("gpt:13m", 4096, 256)


def test_gpt2_is_gpt2():
    assert shape_of("gpt2", 50257, 128).length == 1024
    for vocabulary, length in ((4096, 1024), (50257, 1025)):
        with pytest.raises(ValueError, match="gpt2 has a vocabulary of 50,257 and at most 1,024"):
            shape_of("gpt2", vocabulary, length)


def test_a_sequence_too_long():
    with pytest.raises(ValueError, match="a sequence of 13 tokens; this GPT has 12 positions"):
        make()(some_tokens(length=13))
