// A table that is wider than the page scrolls by itself; here it can be reached, and so scrolled, by keyboard too.
function mark() {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (frame.scrollWidth > frame.clientWidth) {
      frame.tabIndex = 0;
      frame.setAttribute("role", "group");
      frame.setAttribute("aria-label", "A wide table");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) frame.removeAttribute(name);
    }
  }
}
// The theme makes the frames, after this file is read and whenever a page is opened.
new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mark);
mark();
