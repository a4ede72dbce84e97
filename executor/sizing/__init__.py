"""Choose numbers of envs and workers: run settings on this machine, and take the smallest of the fastest ones.

settings       the settings to compare
probing        a probe worker builds, resets and steps one env; the result is a `measurement`
limits         the resources of a setting, and the settings that do not fit
driving        run an executor like a training loop, in turns
choosing       choose from a table of speeds in rounds
search         start executors, run them in rounds, drop and compare them
scaling        scale measurements to other numbers and other machines
reasons        sentences on the bottleneck
recommending   all of this in one call, and "auto"
"""
