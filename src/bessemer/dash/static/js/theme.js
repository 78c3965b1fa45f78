// Before anything is painted: the theme chosen last time, else what the system prefers.
(function () {
  var chosen = null;
  try {
    chosen = localStorage.getItem("bessemer-theme");
  } catch {
    /* no storage: the system's choice */
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
