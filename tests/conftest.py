"""One hypothesis profile for everybody: no per-example deadline, because the machines are shared."""

from hypothesis import settings

settings.register_profile("kvevents", deadline=None)
settings.load_profile("kvevents")
