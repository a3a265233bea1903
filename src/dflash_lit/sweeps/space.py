"""Search spaces: overrides in Hydra's grammar, as Optuna's distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from dflash_lit.errors import UserError

__all__ = ["make_space"]


def make_space(params: Mapping[str, object], arguments: Sequence[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Tell what is searched from what is fixed.

    ``a,b`` and ``choice(a, b)`` are unordered choices, ``range(1, 5)`` whole numbers or equal steps with their order,
    ``interval(1e-3, 1e-1)`` a range of numbers, of whole ones as ``int(interval(1, 8))``, on a logarithmic scale with
    ``tag(log, interval(...))``.

    Args:
        params: ``hydra.sweeper.params``: key -> value. Not searched if the arguments search anything; a value of theirs fixes its key.
        arguments: overrides of the command line.

    Returns:
        key -> distribution, and the overrides of every job.

    Raises:
        UserError: for a range that is empty, or an interval whose end is not above its start.
    """
    parse = OverridesParser.create().parse_overrides
    given = parse(list(arguments))
    keys = {override.get_key_element() for override in given}
    own = any(override.is_sweep_override() for override in given)
    usual = parse([f"{key}={value}" for key, value in params.items() if not own])
    space: dict[str, BaseDistribution] = {}
    rest: list[str] = []
    for override in [*(one for one in usual if one.get_key_element() not in keys), *given]:
        if override.is_sweep_override():
            space[override.get_key_element()] = _distribution(override)
        else:
            assert override.input_line is not None
            rest.append(override.input_line)
    return space, rest


def _distribution(override: Override) -> BaseDistribution:
    if override.is_interval_sweep():
        value = override.value()
        assert isinstance(value, IntervalSweep)
        low, high, log = value.start, value.end, "log" in value.tags
        assert low is not None
        assert high is not None
        if not low < high or (log and low <= 0):
            above = " above 0" if log else ""
            raise UserError(f"{override.input_line}: give an interval{above} whose end lies above its start")
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log)
        return FloatDistribution(low, high, log=log)
    # As text: what a job is given is what was written.
    choices = list(override.sweep_string_iterator())
    if not choices:
        raise UserError(f"{override.input_line}: holds no value")
    if override.is_range_sweep() and all(choice.lstrip("-").isdecimal() for choice in choices):
        numbers = sorted(int(choice) for choice in choices)
        return IntDistribution(numbers[0], numbers[-1], step=numbers[1] - numbers[0] if len(numbers) > 1 else 1)
    return CategoricalDistribution(choices)
