"""The section `kafka.registry`: a schema registry that names the schemas of the run's records.

A URL with credentials in it is refused, so the URL may be shown.
"""

from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator

from dora.config.section import Section


class RegistrySection(Section):
    """A schema registry with Confluent's API; records are then written in its wire format."""

    url: str
    """Root of the API, `http://` or `https://`; several, separated by commas, are tried in turn."""
    properties: dict[str, SecretStr] = {}
    """Properties of confluent-kafka's registry client: `basic.auth.user.info` (`user:password`),
    `ssl.ca.location`, `ssl.certificate.location`, `bearer.auth.token` and similar."""
    register_schemas: bool = True
    """Register missing schemas and set their compatibility. With false they must be registered
    already: they are looked up, and a missing one is refused."""

    @field_validator("url")
    @classmethod
    def _addresses(cls, url: str) -> str:
        for each in url.split(","):
            # The text may hold a password: it is not repeated.
            try:
                parts = urlsplit(each.strip())
                host = parts.hostname
                _ = parts.port
            except ValueError as error:
                raise ValueError("kafka.registry.url is no URL") from error
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError("kafka.registry.url must be http://HOST:PORT or https://HOST:PORT")
            if parts.username is not None:
                raise ValueError(
                    "kafka.registry.url must not hold credentials: give them as "
                    'kafka.registry.properties."basic.auth.user.info"'
                )
        return url
