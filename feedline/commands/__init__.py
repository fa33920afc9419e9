"""The commands of ``feedline``, one module each: ``add_arguments(parser)`` and ``run(args) -> int``."""
