"""The paths of a config, made absolute."""

from __future__ import annotations

from pathlib import Path

import attrs

from .names import OWN_PARTS, absolute
from .schema import Config
from .tasks import absolute_env, absolute_task


def with_absolute_paths(cfg: Config, folder: Path) -> Config:
    """Returns the config with absolute paths, so that it does not depend on the current folder.

    Example:
        >>> with_absolute_paths(Config(), Path("/a")).trainer.dir
        '/a/runs/run'
    """

    def path(name: str) -> str:
        return str((folder / name).resolve()) if name and not name.startswith("hub:") else name

    d, t, a = cfg.data, cfg.trainer, cfg.algorithm
    references = {
        name: absolute(value, folder)
        for name, value in ((n, getattr(a.options, n, None)) for n in OWN_PARTS)
        if isinstance(value, str)
    }
    folders = ((name, getattr(a.options, name, None)) for name in ("reward_model", "teacher"))
    references |= {name: path(value) for name, value in folders if isinstance(value, str)}
    return attrs.evolve(
        cfg,
        trainer=attrs.evolve(
            t,
            dir=path(t.dir),
            resume_from_path=t.resume_from_path and path(t.resume_from_path),
            rollout_data_dir=t.rollout_data_dir and path(t.rollout_data_dir),
        ),
        data=attrs.evolve(
            d,
            train_files=tuple(map(path, d.train_files)),
            val_files=tuple(map(path, d.val_files)),
            convert=tuple(absolute(name, folder) for name in d.convert),
            task=absolute_task(d.task, folder),
        ),
        model=attrs.evolve(cfg.model, path=path(cfg.model.path)),
        critic=attrs.evolve(cfg.critic, path=cfg.critic.path and path(cfg.critic.path)),
        env=absolute_env(cfg.env, folder),
        reward=attrs.evolve(cfg.reward, functions=tuple(absolute(f, folder) for f in cfg.reward.functions)),
        ray=attrs.evolve(cfg.ray, runtime_env=path(cfg.ray.runtime_env)),
        algorithm=attrs.evolve(
            a,
            name=absolute(a.name, folder),
            options=attrs.evolve(a.options, **references) if references else a.options,
        ),
    )
