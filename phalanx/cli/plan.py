"""`phalanx plan` and `phalanx serve --dry-run`: how a model would be laid out, and whether it fits. Starts nothing."""

from __future__ import annotations

from phalanx.cli.flags import Parser, settings
from phalanx.config import EngineConfig

_DESCRIPTION = """\
Say how MODEL would be split over devices and whether it fits, without starting anything: memory of each rank, the size
of the KV cache, and which device decides it. A folder with only config.json is enough. Without --declare-device the
devices of this machine are used; with several and no -tp or -pp, the layout is chosen."""


def run(argv: list[str]) -> int:
    parser = Parser("plan", _DESCRIPTION, positional=True, sections=("model", "cache", "scheduler", "parallel"))
    return show(settings(parser, argv).config)


def show(config: EngineConfig) -> int:
    """Print the plan. Raises UserError when there is none."""
    from phalanx.checkpoint.locate import locate_config, locate_tokenizer
    from phalanx.engine.resolution import check_named
    from phalanx.planner.resolution import dry_run

    wanted = config.model
    check_named(config)
    name, model_config, checkpoint = locate_config(wanted.model, revision=wanted.revision)
    if wanted.tokenizer is not None:
        from phalanx.text.tokenizer import from_folder

        from_folder(locate_tokenizer(wanted.tokenizer, revision=wanted.revision), model_config)
    called = (*wanted.served_model_name, name)[0]
    print("\n".join(dry_run(config, called, model_config, checkpoint)))
    return 0
