"""The byte-level GPT looks back only, and its first weights depend on the seed alone."""

import math

import torch

from torchbelay.lab.gpt.network import ByteGPT, Shape, decayed, loss_of, seeded

SHAPE = Shape(layers=2, width=16, heads=2, context=8)


def test_a_byte_does_not_see_those_after_it() -> None:
    network = seeded(SHAPE, 0)
    text = torch.randint(0, 256, (3, 8))
    other = text.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 256
    one, two = network(text), network(other)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5:], two[:, 5:])


def test_it_begins_without_an_opinion() -> None:
    text, following = torch.randint(0, 256, (2, 64, 8))
    loss = loss_of(seeded(SHAPE, 1)(text), following)
    assert abs(loss.item() - math.log(256)) < 0.1


def test_its_first_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = seeded(SHAPE, 3)
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert torch.rand(()) == drawn  # the caller's generator is untouched
    two = seeded(SHAPE, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.bytes.weight, seeded(SHAPE, 4).bytes.weight)


def test_the_optimizer_gets_every_parameter_once() -> None:
    network = ByteGPT(SHAPE)
    given = [p for group in decayed(network) for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(map(id, given)) == sorted(map(id, network.parameters()))


def test_the_full_size_is_that_of_the_protocol() -> None:
    assert sum(p.numel() for p in ByteGPT(Shape()).parameters()) == 6 * 12 * 384**2 + 13 * 384 + (256 + 256) * 384
