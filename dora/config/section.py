"""Base class and types of the configuration's sections."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]
Positive = Annotated[int, Field(ge=1)]
Hook = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
