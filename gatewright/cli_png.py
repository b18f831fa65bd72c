"""A picture as PNG, drawn with Pillow (extra `plot`)."""

import io

from PIL import Image, ImageDraw, ImageFont

from gatewright.report.plan_picture import Picture

ANCHORS = {"left": "ls", "right": "rs"}
WRITTEN = str.maketrans({"×": "x", "…": "..."})
"""Signs that the font inside Pillow lacks; it is there whatever fonts a machine has."""


def draw(picture: Picture, *, scale: int = 2) -> bytes:
    """PNG bytes, `scale` pixels a unit."""
    image = Image.new("RGB", (picture.width * scale, picture.height * scale), picture.background)
    pen = ImageDraw.Draw(image)
    for box in picture.boxes:
        left, top, right, bottom = (round(scale * edge) for edge in (box.left, box.top, box.right, box.bottom))
        if right > left and bottom > top:
            pen.rectangle((left, top, right - 1, bottom - 1), fill=box.colour)
    for word in picture.words:
        font = ImageFont.load_default(word.size * scale)
        text = word.text.translate(WRITTEN)
        pen.text((word.x * scale, word.y * scale), text, fill=word.colour, font=font, anchor=ANCHORS[word.anchor])
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()
