"""The first screen of the README: needs the images that ``make quickstart`` (or ``minisandbox quickstart``) builds."""

from minisandbox import Sandbox, Store, load_image

image = load_image(Store.open(), "pytoolz__toolz-1.0.0.update_in")
with Sandbox.create(image.spec()) as box:
    result = box.exec("python -m pytest -q", timeout=60)
    print(result.fate, "|", result.stdout.splitlines()[-1])
    box.files.write_text("NEWS.md", "# News\n")
    print(box.patch().decode())
