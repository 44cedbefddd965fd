"""What every section of the config is."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from megappo.config.coercion import as_declared


class Section(BaseModel):
    """A section of the config: frozen, and refusing keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _as_declared(cls, value: object, info: ValidationInfo) -> object:
        return as_declared(value, cls.model_fields[str(info.field_name)].annotation)
