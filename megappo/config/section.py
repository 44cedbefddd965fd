"""What every section of the config is."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from megappo.config.coercion import as_declared
from megappo.config.conditions import ReadIf


class Section(BaseModel):
    """A section of the config: frozen, and refusing keys it does not know.

    Attributes:
        read_if: what makes a run read keys of the section; the others it always reads.
    """

    read_if: ClassVar[tuple[ReadIf, ...]] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _as_declared(cls, value: object, info: ValidationInfo) -> object:
        return as_declared(value, cls.model_fields[str(info.field_name)].annotation)
