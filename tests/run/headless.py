"""A headless Chromium that is told what to do through a pipe."""

import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser, which `close` or the end of a `with` ends."""

    def __init__(self, folder, width=1280, height=900):
        there, self.answers = os.pipe()
        self.questions, here = os.pipe()
        self.ask, self.hear = here, there
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        # the browser reads from 3 and writes to 4
        line = f'exec "$@" 3<&{self.questions} 4>&{self.answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "browser", BROWSER, *options],
            pass_fds=(self.questions, self.answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(self.questions)
        os.close(self.answers)
        self.buffer = b""
        self.count = 0
        self.session = None
        self.errors = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.send("Runtime.enable")
        self.send("Page.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def receive(self):
        while b"\0" not in self.buffer:
            found = os.read(self.hear, 1 << 20)
            assert found, "the browser has ended"
            self.buffer += found
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        return message

    def send(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path):
        self.send("Page.navigate", url=f"file://{path}")
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def point(self, selector, share=0.5):
        """Move the mouse over an element, `share` of the way from its left side."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.value(
            f"(({{x, y, width, height}}) => [x, y, width, height])({find}.getBoundingClientRect())"
        )
        x, y, width, height = box
        where = {"x": x + share * width, "y": y + height / 2}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **where)

    def type(self, text):
        """Press and let go of one key after the other: pages may wait for any of the events of typing."""
        for letter in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ask)
        os.close(self.hear)
