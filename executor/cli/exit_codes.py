"""Exit codes of the commands; 0 is success. For `replay CAPSULE`, success is that the env fails again."""

EXIT_FAILED = 1
EXIT_USAGE = 2
#: Of `replay CAPSULE`: all steps went through.
EXIT_NO_FAILURE = 3
EXIT_INTERRUPTED = 130
