"""For all tests: hypothesis without its clock, which measures how busy the machine is."""

from hypothesis import settings

settings.register_profile("onechip", deadline=None)
settings.load_profile("onechip")
