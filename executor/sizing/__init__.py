"""How many envs on how many workers: measured (a probe), decided (pure arithmetic), and shown.

probing     a probe worker builds, resets and steps the env, within a budget of time and memory
overhead    what a batch costs besides the env, on this machine: the same arrays from an env that does nothing
comparing   how fast some envs really are on some workers, in all modes: what the model is multiplied by
model       a setting's env-steps per second and memory, predicted from these
deciding    which setting, and what keeps it from being faster
verifying   predicted against measured
"""
