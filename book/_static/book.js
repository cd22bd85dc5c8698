// Excerpts of search results are fetched, which a page opened from disk may not do.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY &&= location.protocol !== "file:";

// A formula wider than the page scrolls: the keyboard has to reach it.
function reach() {
  for (const formula of document.querySelectorAll("div.math mjx-container")) {
    formula.tabIndex = formula.scrollWidth > formula.clientWidth ? 0 : -1;
  }
}
addEventListener("load", () => window.MathJax?.startup?.promise.then(reach));
addEventListener("resize", reach);
