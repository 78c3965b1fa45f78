// Opened from the disk, a browser starts no worker and fetches no file: there, the search runs in the page itself.

if (window.location.protocol === "file:") {
  window.Worker = class {
    postMessage(message) {
      if (message.init) this.load("lunr.js", () => this.load("search_index.js", () => this.build()));
      else this.onmessage({ data: { results: this.search(message.query) } });
    }

    load(name, then) {
      const script = document.createElement("script");
      script.src = `${base_url}/search/${name}`;
      script.onload = then;
      document.head.append(script);
    }

    build() {
      const { config, docs } = window.searchIndex; // search_index.json, as a script: docs/search.py
      this.documents = new Map(docs.map((found) => [found.location, found]));
      lunr.tokenizer.separator = new RegExp(config.separator);
      this.index = lunr(function () {
        this.field("title");
        this.field("text");
        this.ref("location");
        docs.forEach((found) => this.add(found));
      });
      this.onmessage({ data: { config } });
      this.onmessage({ data: { allowSearch: true } });
    }

    search(query) {
      return this.index.search(query).map(({ ref }) => {
        const found = this.documents.get(ref);
        return { ...found, summary: found.text.substring(0, 200) };
      });
    }
  };
}
