"""Programs whose numbers depend on which samples are a rank's, by what they train."""

from __future__ import annotations

from equality.programs import basic, buffers, language, self_supervised, structured, vision

# In the default tier.
PROGRAMS = {program.__name__: program for program in basic.PROGRAMS}

# In the slow tier.
MORE_PROGRAMS = {
    program.__name__: program
    for module in (self_supervised, vision, language, structured, buffers)
    for program in module.PROGRAMS
}
