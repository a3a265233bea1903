"""``dflash-lit doctor``: what is installed, whether it fits together, and what to do where it does not.

:func:`look` reads the facts of this machine into a :class:`Machine`, :func:`examine` judges them and touches nothing else.
Libraries that do not fit together can keep torch itself from being imported, so nothing here needs it.
"""

from dflash_lit.doctor.examine import examine
from dflash_lit.doctor.finding import Finding
from dflash_lit.doctor.look import look
from dflash_lit.doctor.machine import Machine

__all__ = ["Finding", "Machine", "examine", "look"]
