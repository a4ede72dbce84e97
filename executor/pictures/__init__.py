"""Pictures and videos of envs, for the command line and for `VideoRecorder`."""
