"""Choose numbers of envs and workers: run settings on this machine, and take the smallest of the fastest ones.

settings       which settings are compared
probing        a probe worker builds, resets and steps one env: its figures are a `measurement`
limits         what a setting takes, and which settings do not fit
driving        an executor run as a training loop would, a turn at a time
choosing       the choice, from a table of speeds in rounds
search         executors started, run in rounds, dropped, compared
scaling        what was measured, for other numbers and other machines
reasons        what binds, in sentences
recommending   all of it in one call, and "auto"
"""
