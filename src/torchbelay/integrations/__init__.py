"""One file per framework that trains models, and the only place that imports it; nothing here averages by itself."""
