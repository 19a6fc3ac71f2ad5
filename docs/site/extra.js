// What is wider than the page, a table or code, scrolls by itself; here it can be reached, and so scrolled, by keyboard
// too. The theme does so for code, but some time after the page has become narrow.
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
  for (const code of document.querySelectorAll("pre > code")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  }
}
// The theme makes the frames, after this file is read and whenever a page is opened.
new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mark);
mark();
