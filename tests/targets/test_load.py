"""Everything that a command line can name is loaded, or refused in one sentence that holds the fact."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from torch import nn

import intently
from intently import CannotCheck, Target
from intently.targets import load

GOOD = """
    import torch
    from torch import nn
    from intently import Intent, Mask, Target

    class Net(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    class Needs(Net):
        def __init__(self, width):
            super().__init__(width)

    class Shelf:
        net = Net()

    def build():
        return Net()

    def pair():
        return Net(), "and its tokenizer"

    def whole():
        return Target(Net(), Intent(Mask.causal()), features=8)

    def attention(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    def broken():
        raise KeyError("no such weights")

    def wrong():
        return 3

    ready = Net()
    target = Target(ready, name="mine")
    number = 7
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "net.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    yield write
    for name in [n for n in sys.modules if n.startswith("_intently_target_")]:
        del sys.modules[name]


def refused(text: str, **options) -> str:
    with pytest.raises(CannotCheck) as raised:
        load(text, **options)
    said = str(raised.value)
    assert "Traceback" not in said and "\n" not in said
    return said


@pytest.mark.parametrize("name", ["build", "Net", "ready", "pair", "Shelf.net"])
def test_modules(file, name):
    where = file(GOOD)
    target = load(f"{where}:{name}")
    assert isinstance(target.model, nn.Module) and type(target.model).__name__ == "Net"
    assert target.label == f"{where}:{name}"


def test_targets_keep_what_they_say(file):
    where = file(GOOD)
    assert load(f"{where}:target").label == "mine"
    target = load(f"{where}:whole")
    assert (str(target.intent), target.features, target.label) == ("causal", 8, f"{where}:whole")


def test_a_function_of_q_k_v(file):
    target = load(f"{file(GOOD)}:attention")
    assert callable(target.model) and target.model.__name__ == "attention"


def test_without_a_name_the_usual_one_is_taken(file):
    where = file(GOOD)
    assert load(where).label == f"{where}:build"


def test_a_module_by_its_dotted_name():
    target = load("torch.nn:Softmax")
    assert isinstance(target.model, nn.Softmax)


def test_options(file):
    where = file(GOOD)
    target = load(f"{where}:Net", intent="causal & window(2)", features=8, length=5, padding="mask:hide", tokens=9)
    assert (str(target.intent), target.features, target.length) == ("causal & window(2)", 8, 5)
    assert (target.padding, target.tokens) == ("mask:hide", 9)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("biuld", ["has no name 'biuld'", "it defines:", "build", ":build"]),
        ("Needs", ["is a class whose constructor needs arguments", "return Needs("]),
        ("broken", ["broken() raised while it built the model", "KeyError: 'no such weights'"]),
        ("wrong", ["wrong() returned a int"]),
        ("number", ["is a int", "a function of q, k, v"]),
        ("Shelf.nat", ["has no name 'nat'"]),
    ],
)
def test_names_that_are_no_target(file, name, facts):
    said = refused(f"{file(GOOD)}:{name}")
    assert all(fact in said for fact in facts), said


def test_missing_file(file, tmp_path):
    file(GOOD)
    assert "there is no file" in refused(f"{tmp_path}/other.py:build")
    said = refused(f"{tmp_path}/nett.py:build")
    assert "there is no file" in said and "net.py" in said


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("import torch\ndef build(:\n    pass", ["has a syntax error in line 2", "def build(:"]),
        ("import no_such_package_at_all", ["could not be imported", "no_such_package_at_all"]),
        ("from torch import no_such_name", ["could not be imported", "no_such_name"]),
        ("x = 1 / 0", ["raised while it was imported", "ZeroDivisionError: division by zero"]),
        ("x = 1", ["needs a name after a colon", "it defines: nothing of its own"]),
    ],
)
def test_files_that_cannot_be_imported(file, text, facts):
    before = list(sys.path)
    said = refused(file(text))
    assert all(fact in said for fact in facts), said
    assert sys.path == before


def test_packages_that_cannot_be_imported():
    assert "no_such_package_at_all" in refused("no_such_package_at_all:build")
    assert "no_such_module" in refused("intently.no_such_module:build")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_files_of_other_kinds(suffix):
    assert f"is a {suffix} file" in refused(f"model{suffix}")


def test_an_intent_that_is_no_phrase(file):
    said = refused(f"{file(GOOD)}:Net", intent="casual")
    assert "'casual' is not a mask in words" in said and "causal" in said


# -- models that load and cannot be checked -------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 8**0.5).softmax(-1) @ v


def uncheckable(target, **options) -> str:
    with pytest.raises(CannotCheck) as raised:
        intently.check(target, **options)
    return str(raised.value)


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = Net()
    assert "meta device" in uncheckable(model)


def test_a_model_of_nan():
    model = Net()
    nn.init.constant_(model.qkv.weight, float("nan"))
    assert "hold NaN, the first is qkv.weight" in uncheckable(model)


def test_a_model_without_attention():
    said = uncheckable(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    assert "no attention call was seen while Sequential ran" in said


def test_a_model_that_raises():
    class Raises(Net):
        def forward(self, x):
            raise OSError("the disk is full")

    said = uncheckable(Raises())
    assert "Raises raised on every input tried for x" in said and "OSError: the disk is full" in said


def test_a_model_whose_output_stands_still():
    class Dead(Net):
        def forward(self, x):
            return super().forward(x) * 0

    assert "no change of any input moves the output of Dead" in uncheckable(Dead())


def test_a_model_that_returns_no_tensor():
    class Words(Net):
        def forward(self, x):
            super().forward(x)
            return "words"

    assert "(str) holds no floating tensor" in uncheckable(Words())


def test_one_position(file):
    said = uncheckable(load(f"{file(GOOD)}:Net", length=1))
    assert "is one position long" in said and "nothing to see or to hide" in said
    assert "is one position long" in uncheckable(Target(Net(), length=1))


def test_a_path_that_leads_nowhere_is_no_module() -> None:
    for text in ("../nowhere/model", "./model", "folder/model"):
        with pytest.raises(CannotCheck, match="there is no file or folder"):
            load(text)
