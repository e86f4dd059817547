// A worker for pages that are opened from a disk, where browsers refuse real ones: the script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><body></body>")
      inside.document.close()
      inside.postMessage = data => this.answer(data)
      inside.importScripts = (...urls) => Promise.all(urls.map(x => this.load(new URL(x, url))))
      this.load(url).then(() => {
        const early = this.waiting
        this.waiting = null
        early.forEach(data => this.postMessage(data))
      })
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script")
        script.onload = done
        script.onerror = failed
        script.src = url
        this.frame.contentDocument.body.appendChild(script)
      })
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new this.frame.contentWindow.MessageEvent("message", {data}))
    }
    answer(data) {
      const event = new MessageEvent("message", {data})
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    terminate() { this.frame.remove() }
  }
}
