"""Debian's Chromium, headless, driven by Selenium, with the actions that page tests need."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

#: Pixels, width and height.
SIZES: Final = {"desk": (1280, 900), "phone": (360, 740)}

_CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (c) => c.slice(0, 3)
  .map((v) => v / 255)
  .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const colour = rgb(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
};
const ratios = [...document.body.querySelectorAll("*")]
  .filter((one) => one.offsetParent && [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
  .map((one) => [light(rgb(getComputedStyle(one).color)), light(behind(one))])
  .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
return Math.min(...ratios);
"""


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def show(self, address: str, size_name: str) -> None:
        """Load a page in a window; `size_name` is a key of `SIZES`."""
        width, height = SIZES[size_name]
        told = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size_name == "phone"}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", told)
        self.complaints()  # drop the previous page's
        self._driver.get(address)

    def prefer(self, scheme: str) -> None:
        """Prefer the `light` or `dark` colour scheme, and reduced motion."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str) -> Any:
        """Run JavaScript; return its result."""
        return self._driver.execute_script(script)

    def press(self, action: str, answer: str, namespace: str | None = None) -> None:
        """Press a button, and answer its dialog."""
        self._find(f"[data-action={action}]").click()
        if namespace is not None:
            field = self._find("#namespace")
            field.clear()
            field.send_keys(namespace)
        self._find(f"dialog button[value={answer}]").click()

    def shows(self, action: str) -> bool:
        """Whether a button is visible."""
        return bool(self._find(f"[data-action={action}]").is_displayed())

    def told(self) -> str:
        """Return the message of the last action."""
        return str(self.run("return document.getElementById('result').innerText"))

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def least_contrast(self) -> float:
        """Return the lowest contrast ratio of the visible texts, as WCAG defines it."""
        return float(self.run(_CONTRAST))

    def fit(self) -> None:
        """Make the window as high as the page."""
        height = self.run("return document.documentElement.scrollHeight")
        told = {"width": SIZES["desk"][0], "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", told)

    def save(self, path: str) -> None:
        """Save a picture of the window."""
        self._driver.save_screenshot(path)

    def _find(self, selector: str) -> Any:
        return self._driver.find_element("css selector", selector)


@contextmanager
def open_browser() -> Iterator[Browser | None]:
    """Yield a browser; None if Chromium, its driver or Selenium is missing."""
    binary, service = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        binary = None
    if binary is None or service is None:
        yield None
        return
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
