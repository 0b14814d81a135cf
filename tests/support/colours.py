"""How far apart two colours are to the eye: WCAG 2, relative luminance and contrast ratio."""

from __future__ import annotations


def luminance(colour: str) -> float:
    """Return how light a colour, written `#rrggbb`, is: 0 to 1."""

    def part(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (part(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the ratio of two colours: 1 for the same, 21 for black and white."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
