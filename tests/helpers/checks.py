"""Comparisons whose failures say what is off; they need torch alone."""
import itertools

import pytest
import torch


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def value_error(reason):
    """A ValueError that says so, in one line: a dot stands for no line break."""
    return pytest.raises(ValueError, match=rf"^(?=.*({reason})).*\Z")


def same(found, expected, name="it"):
    """Equal to the last bit; else the message names the tensor, the entry, and both sides."""
    found, expected = (vars(x) if hasattr(x, "__dataclass_fields__") else x
                       for x in (found, expected))
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{name}: {found.keys() ^ expected.keys()}"
        for key, value in expected.items():
            same(found[key], value, f"{name}, {key}")
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        apart = (found != expected).nonzero().tolist()
        if apart:
            at = tuple(apart[0])
            assert not apart, (f"{name}{list(at)}: found {found[at].item()!r}, expected "
                               f"{expected[at].item()!r}; {len(apart)} entries differ")
    elif isinstance(expected, (list, tuple)) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected)):
            same(*pair, f"{name}[{i}]")
    else:
        assert found == expected, f"{name}: found {found!r}, expected {expected!r}"


def is_same(found, expected):
    """Whether `same` has nothing to say."""
    try:
        same(found, expected)
    except AssertionError:
        return False
    return True


def pairwise(*options):
    """Few rows with a value of each option, in which every two values meet at least once."""
    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    rows = list(itertools.product(*options))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & pairs(row))))
        missing -= pairs(chosen[-1])
    return chosen
