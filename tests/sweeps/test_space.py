"""Hydra's overrides as Optuna's distributions."""

from __future__ import annotations

import pytest

from dflash_lit.errors import UserError

optuna = pytest.importorskip("optuna", reason="the extra [sweeps] is not installed")

from optuna.distributions import CategoricalDistribution as Choice  # noqa: E402
from optuna.distributions import FloatDistribution as Float  # noqa: E402
from optuna.distributions import IntDistribution as Int  # noqa: E402

from dflash_lit.sweeps.space import make_space  # noqa: E402


@pytest.mark.parametrize(
    ("override", "distribution"),
    [
        ("objective.gamma=4,7,14", Choice(["4", "7", "14"])),
        ("objective=choice(dpace,soft)", Choice(["dpace", "soft"])),
        ("drafter.layers=range(1,6,2)", Int(1, 5, step=2)),
        ("drafter.layers=range(3,4)", Int(3, 3)),
        ("drafter.layers=int(interval(1,8))", Int(1, 8)),
        ("drafter.anchors=tag(log,int(interval(8,512)))", Int(8, 512, log=True)),
        ("optimizer.lr=interval(0.001,1)", Float(0.001, 1.0)),
        ("optimizer.lr=tag(log,interval(1e-4,1e-1))", Float(1e-4, 1e-1, log=True)),
    ],
)
def test_kinds(override: str, distribution: object) -> None:
    space, fixed = make_space({}, [override])
    assert space == {override.split("=")[0]: distribution}
    assert fixed == []


def test_the_command_line_fixes_keys_of_the_files_space_or_has_one_of_its_own() -> None:
    params = {"optimizer.lr": "interval(0.1,0.2)", "seed": 3, "objective": "dpace,soft"}
    space, fixed = make_space(params, ["optimizer.lr=0.5", "debug=fast", "~logger.csv", "+callbacks.x={a: 1}"])
    assert space == {"objective": Choice(["dpace", "soft"])}
    assert fixed == ["seed=3", "optimizer.lr=0.5", "debug=fast", "~logger.csv", "+callbacks.x={a: 1}"]
    space, fixed = make_space(params, ["drafter.layers=1,2", "debug=fast"])
    assert space == {"drafter.layers": Choice(["1", "2"])}
    assert fixed == ["debug=fast"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.lr=interval(2,1)", r"optimizer\.lr=.*whose end lies above its start"),
        ("optimizer.lr=tag(log,interval(0,1))", "above 0"),
        ("drafter.layers=range(3,3)", "holds no value"),
    ],
)
def test_empty_spaces_are_refused(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_space({}, [override])
