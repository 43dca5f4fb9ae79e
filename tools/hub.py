"""Uploads a model folder to a hub, with huggingface_hub: HF_TOKEN and HF_ENDPOINT as its documentation says."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

# Of the HTTP library that the installed release is built on, which differs between releases.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from vagen.common.errors import InfrastructureError
from vagen.learner.config import require_repository

__all__ = ["push"]


def push(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Make the repository where it is missing, commit the folder's files, and return the commit's address.

    Weights that the folder lacks are deleted there. Raises `ConfigError` for a name that is no repository's, and
    `InfrastructureError` where the hub does not take them.
    """
    require_repository("push", repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InfrastructureError(
            f"{repository}: not uploaded to {api.endpoint}: {type(error).__name__}: {reason}"
        ) from error
    return str(commit.commit_url)
