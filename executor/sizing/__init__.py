"""Choose numbers of envs and workers: probe one env, apply a rule, and confirm it by running at most three settings.

settings       numbers of envs and workers, and the mode of stepping
probing        a probe worker builds, resets and steps one env; the result is a `measurement`
rule           the settings worth running, from a measurement
limits         the resources of a setting, and the settings that do not fit
search         run these settings in turns, by `driving`, and take the smallest of the fastest
scaling        what was run, or else a prediction from the probe, also for another machine
reasons        sentences on the bottleneck
recommending   all of this in one call, and "auto"
"""
