"""Array annotations: jaxtyping's words where it is installed, stand-ins that mean just the array type elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Bool", "Complex", "Float", "Int", "Integer", "Num", "Shaped"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int, Integer, Num, Shaped
else:
    try:
        from jaxtyping import Bool, Complex, Float, Int, Integer, Num, Shaped
    except ImportError:

        class _Plain:
            """Stands in for a jaxtyping word: ``Float[Tensor, "query key"]`` is then just ``Tensor``."""

            def __class_getitem__(cls, item):
                return item[0]

        Bool = Complex = Float = Int = Integer = Num = Shaped = _Plain
