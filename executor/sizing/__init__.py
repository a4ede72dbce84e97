"""Choose numbers of envs and workers: probe one env, apply a rule, and confirm it by running at most three settings.

settings       numbers of envs and workers, the mode of stepping, and what is known of a setting
driving        start the executor of a setting, and run it like a training loop
probe          an executor of one env measures it; the result is a `measurement`
rule           the settings worth running, from a measurement
limits         what a setting takes and makes by the probe, and the settings that do not fit a machine
confirming     run these settings in turns, and take the smallest of the fastest
reasons        sentences on the bottleneck
recommending   all of this in one call, and "auto"
plotting       a picture of the result
"""
