"""A headless Chromium driven by Selenium."""

import shutil

from selenium import webdriver

FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --window-size=1400,900"


class Chromium:
    """The browser, with its profile in `folder`; `driver` is Selenium's."""

    def __init__(self, folder: str):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*FLAGS.split(), f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        self.driver.set_script_timeout(120)

    def close(self) -> None:
        """End it."""
        self.driver.quit()
